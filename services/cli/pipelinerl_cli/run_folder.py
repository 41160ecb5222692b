"""The folder of a run on this machine: what is in it, which process holds it, and how its run can
be resumed.

```
job.yaml        the effective job, with --set and --max-steps applied; what every service reads
token           bearer token of this run (0600)
lock            held while `pipelinerl up` runs
logs/           one file per process        nats/   the stream's store
autoscale.json  the chosen number of actors, with `autoscale`
model/          the prepared model          checkpoints/, final/   the trainer's
evaluations/    one file per evaluated step
metrics.jsonl   summary.json   report.html   metrics-targets.json (for Prometheus)
```
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pipelinerl_common.checkpoints import complete_checkpoints
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.files import write_whole
from pipelinerl_common.runs.history import RunHistory
from pipelinerl_common.runs.records import read_records
from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.settings.load import write_yaml
from pipelinerl_common.text import did_you_mean_folder

MAY_CHANGE = ("algorithm.steps",)
"""Settings that may differ when a run is resumed, without being mentioned."""
MUST_NOT_CHANGE = ("model.uri", "model.revision", "model.dtype", "seed", "task.path")
"""Settings that would make it another run."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run, and what `pipelinerl up` does with its folder."""

    root: Path

    @property
    def job_file(self) -> Path:
        return self.root / "job.yaml"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def stream_store(self) -> Path:
        return self.root / "nats"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Raises SettingsError when the folder cannot be made or written to."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> SettingsError:
        return SettingsError(
            f"--output {self.root}: cannot be written to: {error}; choose another --output"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process; the kernel releases it however the process ends.
        Raises SettingsError.
        """
        try:
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise SettingsError(
                f"--output {self.root}: another `pipelinerl up` (process {holder or 'unknown'}) is "
                "running in it; stop that one first or choose another --output"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def write_job(self, job: Job) -> None:
        document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
        write_whole(self.job_file, write_yaml(document))

    def make_token(self) -> str:
        """A new token for this session, readable by the owner only."""
        token = secrets.token_urlsafe(32)
        self.token_file.unlink(missing_ok=True)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        return token

    def discard(self) -> None:
        """Removes a run that never began."""
        shutil.rmtree(self.root, ignore_errors=True)

    def move_aside(self) -> Path | None:
        """Makes room for a fresh run; returns the new folder of the old one, None without one."""
        if not self.job_file.exists():
            return None
        old = self.root.with_name(f"{self.root.name}.{datetime.now(UTC):%Y%m%d-%H%M%S}")
        number = 1
        while old.exists():
            number += 1
            old = old.with_name(f"{old.name.partition('_')[0]}_{number}")
        self.root.rename(old)
        return old


@dataclass(frozen=True, slots=True)
class Resume:
    """The run that the folder has already."""

    steps_done: int
    """The step of the newest complete checkpoint."""
    changed: tuple[str, ...]
    """Settings that differ from the earlier session, as "algorithm.loss: ppo -> grpo"."""


def inspect(folder: RunFolder, job: Job) -> Resume | None:
    """None for an empty folder. Raises SettingsError when it has another run."""
    if not folder.job_file.exists():
        others = {path.name for path in folder.root.iterdir()} if folder.root.is_dir() else set()
        if others := others - {"lock", "logs", "token"}:
            raise SettingsError(
                f"--output {folder.root}: the folder holds other files "
                f"({', '.join(sorted(others)[:3])}); choose an empty or a new one"
            )
        return None
    earlier = load_job(folder.job_file)
    if earlier.name != job.name:
        raise SettingsError(
            f"--output {folder.root}: the folder holds a run of the job {earlier.name!r}, not of "
            f"{job.name!r}; choose another --output, or --fresh to move the old run aside"
        )
    changed = changed_settings(earlier, job)
    if forbidden := [each for each in changed if each.partition(":")[0] in MUST_NOT_CHANGE]:
        raise SettingsError(
            f"--output {folder.root}: the run in it has other settings ({'; '.join(forbidden)}) "
            "and cannot be resumed with these; choose another --output, or --fresh to move the old "
            "run aside"
        )
    mentioned = (each for each in changed if each.partition(":")[0] not in MAY_CHANGE)
    return Resume(newest_checkpoint(folder.root), tuple(mentioned))


def newest_checkpoint(root: Path) -> int:
    """Optimizer steps of the newest complete checkpoint, 0 without one. The trainer ignores torn
    ones as well.
    """
    return next(complete_checkpoints(root), 0)


def changed_settings(earlier: Job, now: Job) -> list[str]:
    """Settings below spec that differ, as "path: old -> new"."""
    old, new = flat_settings(earlier), flat_settings(now)
    return [
        f"{path}: {old.get(path, 'unset')} -> {new.get(path, 'unset')}"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


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
