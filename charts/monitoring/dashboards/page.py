"""What all dashboards have in common: their variables, their links, and how they are written down."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

DOCS: Final = "@docsUrl@"
"""Place holder for where charts/docs is published: a value of the chart."""
TAG: Final = "pipelinerl"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$datasource")
_ALL: Final = VariableOption(text="All", value="$__all")


def page(name: str, title: str, description: str, *, of_jobs: bool = True) -> Dashboard:
    """An empty dashboard; `of_jobs` gives it the choice of namespaces and jobs."""
    explanation = (
        DashboardLink("What the numbers mean")
        .type(DashboardLinkType.LINK)
        .icon("doc")
        .target_blank(True)
    )
    others = (
        DashboardLink("PipelineRL").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    )
    dashboard = (
        Dashboard(f"PipelineRL: {title}")
        .uid(f"pipelinerl-{name}")
        .description(description)
        .tags([TAG])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(explanation.url(f"{DOCS}/staleness-metrics.md"))
        .link(others.include_vars(True).keep_time(True))
    )
    if of_jobs:
        dashboard.with_variable(
            _choice("namespace", "Namespace", "label_values(pipelinerl_memory_bytes, namespace)")
        )
        dashboard.with_variable(
            _choice(
                "job",
                "Job",
                'label_values(pipelinerl_memory_bytes{namespace=~"$namespace", job!=""}, job)',
            )
        )
    return dashboard


def _choice(name: str, label: str, query: str) -> QueryVariable:
    """Everything is chosen at first, jobs without a namespace (of `pipelinerl up`) among it."""
    return (
        QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )


def to_json(dashboard: Dashboard) -> str:
    return JSONEncoder(sort_keys=True, indent=1).encode(dashboard.build()) + "\n"
