"""A run's folder, read: the job and how it ended."""

import json
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_cli.results.history import RunHistory
from pipelinerl_cli.results.metrics_file import read_records
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, load_job


@dataclass(frozen=True, slots=True)
class FinishedRun:
    root: Path
    job: Job
    status: str
    """As in summary.json; "running" when there is none yet."""

    def history(self) -> RunHistory:
        """Raises SettingsError when metrics.jsonl cannot be read."""
        return RunHistory(read_records(self.root / "metrics.jsonl"))


def load_run(root: Path) -> FinishedRun:
    """Raises SettingsError when `root` is not a run's folder."""
    for name in ("job.yaml", "metrics.jsonl"):
        if not (root / name).is_file():
            raise SettingsError(f"{root}: not a run's folder: it has no {name}; give the --output folder of a `pipelinerl up`")
    return FinishedRun(root, load_job(root / "job.yaml"), _status(root / "summary.json"))


def _status(summary: Path) -> str:
    try:
        status = json.loads(summary.read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:
        return "running"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{summary}: not a summary of a run: {error!r}; remove it and try again") from error
    return str(status)
