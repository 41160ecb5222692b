"""Dashboards and their panels: the tables of the other modules become Grafana's objects here.

In queries `@` stands for the chosen jobs: `pipelinerl_ess{@}`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common, heatmap, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from monitoring.alert import BY_JOB
from pipelinerl_common.judgements import Judgement

DOCS: Final = "@docsUrl@"
"""Place holder for where docs/pages is published: a value of the chart."""
TAG: Final = "pipelinerl"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$datasource")
_ALL: Final = VariableOption(text="All", value="$__all")
CHOSEN: Final = 'namespace=~"$namespace",job=~"$job"'
RATE: Final = "[$__rate_interval]"
PERCENT, SECONDS, BYTES, SHORT = "percentunit", "s", "bytes", "short"
TOKENS_S, PER_SECOND = "short", "ops"
ABOVE_ZERO = 0.001
"""The least rate that is shown as more than none."""
_GREEN, _ORANGE, _RED = "green", "orange", "red"
_STAT_HEIGHT, _HEIGHT = 4, 8


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a panel: its value is bad above `bad`, or below it."""

    bad: float
    worse: float | None = None
    below: bool = False

    @classmethod
    def of(cls, judgement: Judgement) -> "Limit":
        """Orange at the judgement's limit, red at its alarm; orange at half of a single limit."""
        if judgement.alarm is None:
            return cls(judgement.limit / 2, judgement.limit)
        return cls(judgement.limit, judgement.alarm, judgement.is_low)

    @classmethod
    def at(cls, judgement: Judgement) -> "Limit":
        """Red at the judgement's alarm, without an orange level."""
        return cls(judgement.alarm_limit, below=judgement.is_low)

    def config(self) -> ThresholdsConfig:
        if self.below:
            worst = self.worse if self.worse is not None else self.bad
            middle = [Threshold(worst, _ORANGE)] if self.worse is not None else []
            steps = [Threshold(None, _RED), *middle, Threshold(self.bad, _GREEN)]
        else:
            higher = [Threshold(self.worse, _RED)] if self.worse is not None else []
            steps = [
                Threshold(None, _GREEN),
                Threshold(self.bad, _ORANGE if higher else _RED),
                *higher,
            ]
        return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are pairs of PromQL and legend; `unit` one of Grafana's units."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]
    limit: Limit | None = None
    low: float | None = None
    high: float | None = None
    span: int = 8
    stacked: bool = False

    def add_to(self, dashboard: Dashboard) -> None:
        drawn = (
            timeseries.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(SOURCE)
            .unit(self.unit)
            .span(self.span)
            .height(_HEIGHT)
            .line_width(2 if not self.stacked else 1)
            .fill_opacity(60 if self.stacked else 0)
            .show_points(VisibilityMode.NEVER)
            .legend(_legend())
            .tooltip(
                common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
            )
        )
        if self.stacked:
            drawn.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        if self.low is not None:
            drawn.min(self.low)
        if self.high is not None:
            drawn.max(self.high)
        if self.limit is not None:
            drawn.thresholds(self.limit.config())
            drawn.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
            )
        for ref, (expr, legend) in zip("ABCDEF", self.queries, strict=False):
            drawn.with_target(_query(ref, expr, legend))
        dashboard.with_panel(drawn)


@dataclass(frozen=True, slots=True)
class Number:
    """One large number per job, with its curve behind it."""

    title: str
    description: str
    unit: str
    expr: str
    limit: Limit | None = None
    span: int = 4
    decimals: int | None = None

    def add_to(self, dashboard: Dashboard) -> None:
        drawn = (
            stat.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(SOURCE)
            .unit(self.unit)
            .span(self.span)
            .height(_STAT_HEIGHT)
            .graph_mode(BigValueGraphMode.AREA)
            .with_target(_query("A", self.expr, "{{job}}"))
            .thresholds(self.limit.config() if self.limit else _plain())
        )
        if self.decimals is not None:
            drawn.decimals(self.decimals)
        dashboard.with_panel(drawn)


@dataclass(frozen=True, slots=True)
class Heat:
    """A histogram's values over time as a heat map. `series` is its name without `_bucket`."""

    title: str
    description: str
    unit: str
    series: str
    span: int = 12

    def add_to(self, dashboard: Dashboard) -> None:
        expr = f"sum by (le) (increase({self.series}_bucket{{@}}{RATE}))"
        dashboard.with_panel(
            heatmap.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(SOURCE)
            .span(self.span)
            .height(_HEIGHT)
            .calculate(False)
            .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues"))
            .y_axis(heatmap.YAxisConfig().unit(self.unit))
            .unit(self.unit)
            .with_target(_query("A", expr, "{{le}}").format(PromQueryFormat.HEATMAP))
        )


def rows(dashboard: Dashboard, *groups: tuple[str, Sequence[Panel | Number | Heat]]) -> Dashboard:
    """Adds the panels under their headings."""
    for heading, panels in groups:
        dashboard.with_row(Row(heading))
        for panel in panels:
            panel.add_to(dashboard)
    return dashboard


def newest(series: str, how: str = "max") -> str:
    """The series' value by job. Example: newest("pipelinerl_ess", "min")."""
    return f"{how} {BY_JOB} ({series}{{@}})"


def per_second(series: str, labels: str = "", selector: str = "@") -> str:
    """A counter's increase per second, by job and by `labels`."""
    return (
        f"sum by (namespace, job{', ' + labels if labels else ''}) "
        f"(rate({series}{{{selector}}}{RATE}))"
    )


def quantile(share: float, series: str) -> str:
    """A quantile of a histogram, by job."""
    return (
        f"histogram_quantile({share}, sum by (namespace, job, le) "
        f"(rate({series}_bucket{{@}}{RATE})))"
    )


def _query(ref: str, expr: str, legend: str) -> Dataquery:
    return (
        Dataquery()
        .ref_id(ref)
        .expr(expr.replace("@", CHOSEN))
        .legend_format(legend)
        .datasource(SOURCE)
    )


def _plain() -> ThresholdsConfig:
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([Threshold(None, "blue")])


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
    )


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
        .link(explanation.url(f"{DOCS}/explanation/staleness.md"))
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
    """A choice in which everything is chosen at first, jobs of `pipelinerl up` without a namespace
    too.
    """
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
