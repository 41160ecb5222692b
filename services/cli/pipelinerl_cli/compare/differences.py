"""In which settings the jobs of compared runs differ, and whether their rewards can be compared."""

import json
from collections.abc import Sequence
from typing import Any

from pipelinerl_cli.compare.seeds import Variant
from pipelinerl_cli.results.job_settings import flat_settings

SECTIONS = ("task", "model", "algorithm", "actors", "trainers", "weightTransfer")
"""Of the job file; the staleness policy and the seeds are rows of the numbers' table."""
MOST_COLUMNS = 60
OTHER_TASKS = (
    "WARNING: the runs have different tasks (task.path or task.args), so that rewards "
    "and times to a reward are not comparable."
)


def differences(variants: Sequence[Variant]) -> list[list[str]]:
    """A row for each setting that is not the same in all: its path, and each variant's value, "-"
    where it has none.
    """
    settings = [flat_settings(variant.runs[0].job) for variant in variants]
    paths = dict.fromkeys(path for each in settings for path in each)
    ordered = [path for section in SECTIONS for path in paths if path.partition(".")[0] == section]
    return [
        [path, *(_shown(each.get(path)) for each in settings)]
        for path in ordered
        if _differs(path, settings)
    ]


def warning(variants: Sequence[Variant]) -> str:
    """Empty where all runs have one task."""
    tasks = [variant.runs[0].job.spec.task for variant in variants]
    same = all((task.path, task.args) == (tasks[0].path, tasks[0].args) for task in tasks)
    return "" if same else OTHER_TASKS


def _differs(path: str, settings: Sequence[dict[str, Any]]) -> bool:
    return any(each.get(path) != settings[0].get(path) for each in settings)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_COLUMNS else f"{text[: MOST_COLUMNS - 3]}..."
