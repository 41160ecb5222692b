"""Generator of the chart's dashboards and alerts: `charts/monitoring/generate [--check]`."""
