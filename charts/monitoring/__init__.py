"""The generator of the chart's dashboards and alerts: `charts/monitoring/generate [--check]`.

`files` writes them; `overview`, `staleness`, `throughput`, `weights` and `operating` are tables of
panels and alerts by subject; `panel` and `alert` say what a panel and an alert are. A developer's
tool beside the chart: it needs the Grafana Foundation SDK (extra `dev`), and Helm does not ship it.
"""
