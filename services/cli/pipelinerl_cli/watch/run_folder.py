"""The folder of a run on this machine, live or finished."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl_cli.run_folder import is_held, load_run
from pipelinerl_cli.up.display import duration, render, step_line
from pipelinerl_cli.up.live_metrics import RunView
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.runs.evaluations import evaluation_line
from pipelinerl_common.runs.records import parse_record, quiet_in_file_s
from pipelinerl_common.settings import Job

if TYPE_CHECKING:
    from rich.console import RenderableType

SILENT_S = 60.0
"""A run without a record for this long is reported as silent; one whose process is not on this
machine, as ended.
"""


class Tail:
    """Reads what was appended to a file since the last look, in whole lines. A file that was
    replaced or cut is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[str], bool]:
        """New whole lines, and whether the file is another one than at the last look. Raises
        OSError.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            if replaced:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines(), replaced


class RunFolderSource:
    """A run as its metrics.jsonl shows it, as far as it is written."""

    interval_s = 0.5

    def __init__(self, root: Path, job: Job) -> None:
        self._root = root
        self._tail = Tail(root / "metrics.jsonl")
        self._newest = 0.0
        self._status = "running"
        self._silent: set[str] = set()
        self._begin(job)

    def _begin(self, job: Job) -> None:
        self._job = job
        self._view = RunView(job.spec.algorithm.steps, is_elastic=job.spec.autoscale.enabled)

    @classmethod
    def open(cls, root: Path) -> "RunFolderSource":
        """Raises SettingsError when `root` is not a run's folder."""
        return cls(root, load_run(root).job)

    def look(self) -> Sequence[str]:
        # Before the records are read: after the last record of an ended run none can come.
        held = is_held(self._root / "lock")
        try:
            lines, replaced = self._tail.read()
        except OSError as error:
            raise SettingsError(
                f"{self._root}: metrics.jsonl cannot be read: {error}; was the run moved aside?"
            ) from error
        if replaced:
            self._begin(load_run(self._root).job)
        steps = [shown for line in lines if (shown := self._take(line))]
        self._status = "running" if held else self._result()
        return [*steps, *self._news()]

    def _result(self) -> str:
        """The status of a run that no process of this machine holds: it may be another machine's,
        or another container's.
        """
        summary = self._root / "summary.json"
        if summary.exists() and summary.stat().st_mtime >= self._newest:
            return load_run(self._root).status
        return "running" if time.time() - self._newest < SILENT_S else "ended without a result"

    def _take(self, line: str) -> str | None:
        """A line when the record ends a step or an evaluation, or shows that the trainer went back
        to a checkpoint.
        """
        try:
            record = parse_record(line)
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self._root / 'metrics.jsonl'}: not a metrics record: {line[:80]!r}: {error}"
            ) from error
        self._newest = max(self._newest, record.time)
        if self._view.take(record):
            return step_line(self._view)
        return self._view.rollback.line or evaluation_line(record)

    def headline(self) -> str:
        view, began = self._view, self._view.generation.time.session_start
        age = ""
        if began is not None and not self.has_ended():
            age = f", started {duration(max(0.0, time.time() - began))} ago"
        steps = f"{view.step}/{view.steps_total}"
        return f"{self._job.name}  {self._root}  {self._status}  step {steps}{age}"

    def has_ended(self) -> bool:
        return self._status != "running"

    def render(self, width: int) -> "RenderableType":
        view = self._view
        view.phase = "training" if view.is_training else "no step yet"
        view.detail = "; ".join(self._silences().values())
        place = str(self._root)
        return render(view, name=self._job.name, place=place, state=self._status, width=width)

    def _news(self) -> list[str]:
        """A line for each process that has become silent since the last look, and for each that
        reports again.
        """
        now = self._silences()
        news = [line for name, line in now.items() if name not in self._silent]
        if not self.has_ended():
            back = (name for name in self._silent if name not in now)
            news += [f"{name} reports again, or has ended" for name in back]
        self._silent = set(now)
        return news

    def _silences(self) -> dict[str, str]:
        """A line for each process that is silent while the run continues."""
        if self.has_ended() or not self._newest:
            return {}
        now, view = time.time(), self._view
        if (gap := now - self._newest) >= SILENT_S:
            return {"the run": f"no record for {duration(gap)}; see {self._root / 'logs'}"}
        lines = {
            name: f"{name} has not answered for {now - since:.0f} s"
            for name, since in view.silent.items()
        }
        usual = quiet_in_file_s(view.generation.time.total)
        quiet = {name: seconds for name, seconds in view.quiet.items() if seconds > usual}
        for name, seconds in quiet.items():
            lines[name] = f"{name} has reported nothing for {seconds:.0f} s"
        return lines
