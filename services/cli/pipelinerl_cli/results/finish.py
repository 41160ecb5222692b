"""Writes summary.json and report.html from what a run's folder holds."""

import json
from pathlib import Path
from typing import Any

from pipelinerl_cli.doctor.rules import diagnose_run
from pipelinerl_cli.doctor.run_facts import facts_of
from pipelinerl_cli.report.page import report_page
from pipelinerl_common.files import write_whole
from pipelinerl_common.settings import Job


def write_results(root: Path, job: Job, status: str, failure: str = "") -> dict[str, Any]:
    """Returns the summary; in the file `failure` is added to it, in one line why the run failed.

    Raises SettingsError when metrics.jsonl cannot be read, OSError when something cannot be
    written.
    """
    facts = facts_of(root, job, status, failure=failure)
    document = {**facts.summary, **({"failure": failure} if failure else {})}
    write_whole(root / "summary.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    write_whole(
        root / "report.html", report_page(facts.history, facts.summary, job, diagnose_run(facts))
    )
    return facts.summary
