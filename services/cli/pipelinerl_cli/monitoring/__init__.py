"""Dashboards and alerts of the chart, written here once and generated: `python -m
pipelinerl_cli.monitoring`.
"""
