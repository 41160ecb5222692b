"""Writes summary.json and report.html from what a run's folder holds."""

from pathlib import Path
from typing import Any

from pipelinerl_cli.doctor.plan_facts import JobFacts
from pipelinerl_cli.doctor.rules import diagnose_run
from pipelinerl_cli.doctor.run_facts import RunFacts, given_up_messages
from pipelinerl_cli.report.page import report_page
from pipelinerl_cli.results.history import RunHistory
from pipelinerl_cli.results.metrics_file import read_records
from pipelinerl_cli.results.summary import summarize, write_json
from pipelinerl_common.settings import Job


def write_results(root: Path, job: Job, status: str, failure: str = "") -> dict[str, Any]:
    """Returns the summary; in the file `failure` is added to it, in one line why the run failed.

    Raises SettingsError when metrics.jsonl cannot be read.
    """
    metrics = root / "metrics.jsonl"
    records = tuple(read_records(metrics))
    history = RunHistory(records)
    summary = summarize(history, status=status, job=job.name, seed=job.spec.seed)
    write_json(root / "summary.json", {**summary, **({"failure": failure} if failure else {})})
    facts = RunFacts(JobFacts(job), status, records, failure=failure, messages=given_up_messages(root))
    page = report_page(history, summary, job, diagnose_run(facts))
    temporary = root / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(root / "report.html")
    return summary
