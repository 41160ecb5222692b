"""A run's folder, read: the job and how it ended.

A job's settings by their paths, so that two jobs can be told apart.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_cli.runs.history import RunHistory
from pipelinerl_cli.runs.records import read_records
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.text import did_you_mean_folder


@dataclass(frozen=True, slots=True)
class SavedRun:
    root: Path
    job: Job
    status: str
    """As in summary.json; "running" when there is none yet, or it is of an earlier session."""
    failure: str
    """Why it failed, in one line; empty where it did not, or nobody knows."""
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

    Looks without locking, which could refuse an `up` that starts at that moment.
    """
    try:
        words = Path("/proc", lock.read_text(encoding="ascii").strip(), "cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return b"pipelinerl" in words


def flat_settings(job: Job) -> dict[str, Any]:
    """Those below spec. Example: {"algorithm.optimizer.learningRate": 0.0002, "model.adapter":
    None, ...}.
    """
    return _flat(job.model_dump(mode="json", by_alias=True)["spec"])


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, dict) and node:
        return {
            key: value
            for name, child in node.items()
            for key, value in _flat(child, f"{path}{name}.").items()
        }
    return {path.rstrip("."): node}
