"""Writes summary.json and report.html from what a run's folder holds."""

from pathlib import Path
from typing import Any

from pipelinerl_cli.doctor.rules import diagnose_run
from pipelinerl_cli.doctor.run_facts import RunFacts
from pipelinerl_cli.report.page import report_page
from pipelinerl_cli.results.history import RunHistory
from pipelinerl_cli.results.metrics_file import read_records
from pipelinerl_cli.results.summary import summarize, write_json
from pipelinerl_common.settings import Job


def write_results(root: Path, job: Job, status: str) -> dict[str, Any]:
    """Returns the summary. Raises SettingsError when metrics.jsonl cannot be read."""
    metrics = root / "metrics.jsonl"
    records = tuple(read_records(metrics))
    history = RunHistory(records)
    summary = summarize(history, status=status, job=job.name, seed=job.spec.seed)
    write_json(root / "summary.json", summary)
    page = report_page(history, summary, job, diagnose_run(RunFacts.of(job, status, records)))
    temporary = root / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(root / "report.html")
    return summary
