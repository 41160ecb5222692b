"""The catalogue of metrics as a page of the documentation."""

from pipelinerl_common.metrics.catalog import TABLES
from pipelinerl_common.metrics.metric import Kind, Metric
from pipelinerl_common.text import markdown_table

_HEAD = """# Metrics

Generated from the catalogue by `python e2e/reference_pages.py`; a test holds the two
together. What the numbers mean: [lag, staleness, ESS and queue depth](../explanation/staleness.md).

Every service answers `GET /metrics` at `--metrics-listen`; generators and references do on their
own HTTP port, and add vLLM's own metrics (`vllm:*`) unless `telemetry.engineMetrics` is false.
Every series has the labels `job` and `role` beside those below; `instance` or `pod` comes from the
scrape. Scrape with `honor_labels: true`. `pipelinerl up` writes `metrics-targets.json` into the
run's folder:

```yaml
scrape_configs:
  - job_name: pipelinerl
    honor_labels: true
    scrape_interval: 5s
    file_sd_configs: [{files: [runs/*/metrics-targets.json]}]
```

The records in a run's `metrics.jsonl` have the same names without `pipelinerl_`, labels in braces:
`queue_groups{stage=ready}`. Rank 0 reports the metrics of all ranks of a trainer. A gauge without a
value is missing. Traces: [tracing](../how-to/tracing.md).
"""


def metrics_page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *(_section(title, table) for title, table in TABLES.items())])


def _section(title: str, table: tuple[Metric, ...]) -> str:
    head = ("series", "type", "unit", "role", "labels", "what")
    return f"## {title}\n\n{markdown_table(head, map(_row, table))}\n"


def _row(metric: Metric) -> tuple[str, ...]:
    return (
        f"`{metric.series}`",
        metric.kind,
        metric.unit,
        ", ".join(metric.roles),
        _labels(metric),
        _what(metric),
    )


def _labels(metric: Metric) -> str:
    return "; ".join(
        f"`{name}`: {', '.join(values)}, ..." if values else f"`{name}`"
        for name, values in metric.labels.items()
    )


def _what(metric: Metric) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        return metric.help
    return f"{metric.help} Buckets {', '.join(f'{bound:g}' for bound in metric.buckets)}."
