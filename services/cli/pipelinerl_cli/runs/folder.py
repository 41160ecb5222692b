"""A run's folder, read: its job, its records, and how it ended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelinerl_cli.runs.history import RunHistory
from pipelinerl_cli.runs.records import read_records
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.text import did_you_mean_folder


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run as its folder describes it."""

    root: Path
    job: Job
    status: str
    """As in summary.json; "running" when there is none yet, or it is of an earlier session."""
    failure: str
    """Why it failed, in one line; empty when it did not, or when the reason is unknown."""
    is_live: bool
    """A process of this machine runs it."""

    def history(self) -> RunHistory:
        """Raises SettingsError when metrics.jsonl cannot be read."""
        return RunHistory(read_records(self.root / "metrics.jsonl"))


def load_run(root: Path) -> SavedRun:
    """Raises SettingsError when `root` is not a run's folder."""
    if not root.is_dir():
        raise SettingsError(
            f"{root}: there is no such folder; give the --output folder of a `pipelinerl "
            f"up`{did_you_mean_folder(root)}"
        )
    for name in ("job.yaml", "metrics.jsonl"):
        if not (root / name).is_file():
            raise SettingsError(
                f"{root}: not a run's folder: it has no {name}; give the --output folder of a "
                "`pipelinerl up`"
            )
    job, is_live = load_job(root / "job.yaml"), is_held(root / "lock")
    status, failure = ("running", "") if is_live else _outcome(root / "summary.json")
    return SavedRun(root, job, status, failure, is_live)


def _outcome(summary: Path) -> tuple[str, str]:
    """Status and failure."""
    try:
        document = json.loads(summary.read_text(encoding="utf-8"))
        return str(document["status"]), str(document.get("failure") or "")
    except FileNotFoundError:
        return "running", ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{summary}: not a summary of a run: {error!r}; remove it and try again"
        ) from error


def is_held(lock: Path) -> bool:
    """Whether the process that wrote its id into the run's lock file runs on this machine.

    It only looks: to try the lock could refuse an `up` that starts at that moment.
    """
    try:
        command = psutil.Process(int(lock.read_text(encoding="ascii"))).cmdline()
    except (OSError, ValueError, psutil.Error):
        return False
    return any("pipelinerl" in word for word in command)


def flat_settings(job: Job) -> dict[str, Any]:
    """A job's settings by their paths below spec, so that two jobs can be compared. Example:
    {"algorithm.optimizer.learningRate": 0.0002, "model.adapter": None, ...}.
    """
    return _flat(job.model_dump(mode="json", by_alias=True)["spec"])


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {path.rstrip("."): node}
    flat: dict[str, Any] = {}
    for name, child in node.items():
        flat |= _flat(child, f"{path}{name}.")
    return flat
