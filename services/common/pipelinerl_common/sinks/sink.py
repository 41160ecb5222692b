"""From the records of all of a job's processes to one row per optimizer step.

What a sink is, and the thread that keeps it from holding anything up.

Weights & Biases.

TensorBoard event files.
"""

import logging
import math
import queue
import re
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import TensorBoardSettings, WandbSettings

TRAINER = "trainer"
_LABELS = re.compile(r"\{(.*)\}$")
_MARK = "reward_mean"
"""What a record has that ends a step."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What is known at the end of a step. Example: Row(12, 1764446400.5, {"trainer/ess": 0.97,
    "actor/memory_bytes": 2e8}).
    """

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


class RowBuilder:
    """Remembers the newest values of every process. Those of a role are added up, means are
    averaged.
    """

    def __init__(self, since: float) -> None:
        """Records older than `since` (seconds since 1970) are passed over: an earlier process has
        shown them.
        """
        self._since = since
        self._newest: dict[tuple[str, str], dict[str, float]] = {}

    def take(self, record: MetricsRecord) -> StepRow | None:
        """The row, when the record ends a step."""
        if record.time < self._since:
            return None
        values = {
            _key(name): value
            for name, value in record.values.items()
            if math.isfinite(value) and "_bucket{" not in name
        }
        if record.role == TRAINER:
            if record.step < 0 or _MARK not in record.values:
                return None
            own = {f"{TRAINER}/{name}": value for name, value in values.items()}
            return StepRow(record.step, record.time, {**own, **self._of_roles()})
        self._newest.setdefault((record.role, record.instance), {}).update(values)
        return None

    def _of_roles(self) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for (role, _), values in self._newest.items():
            for name, value in values.items():
                found.setdefault(f"{role}/{name}", []).append(value)
        return {
            name: sum(each) / (len(each) if name.endswith(("_mean", "_ratio")) else 1)
            for name, each in found.items()
        }


def _key(name: str) -> str:
    """Names with labels as paths: "queue_groups{stage=ready}" is "queue_groups/ready"."""
    labels = _LABELS.search(name)
    if labels is None:
        return name
    return "/".join(
        [name[: labels.start()], *(label.partition("=")[2] for label in labels[1].split(","))]
    )


log = logging.getLogger(__name__)

QUEUE_ROWS = 256
MOST_FAILURES = 6
"""In a row: then the sink is given up for this session."""
PAUSE_S = 2.0
"""After a failure; doubled with each further one in a row, so that a network that is away for a
minute is waited for.
"""


class Sink(Protocol):
    """Where rows go. Methods are called one after another from one thread and may take their time
    or raise anything.
    """

    name: str

    def open(self) -> None:
        """Before the first row."""

    def write(self, row: StepRow) -> None:
        """Steps grow, but for those that are trained again after a rollback."""

    def close(self) -> None:
        """After the last row; makes sure that everything is where it should be."""


class SinkThread:
    """Feeds one sink from a bounded queue. What it does not take is counted by reason:

    full     the sink was slower than the rows came
    failed   `write` raised, or the sink had been given up
    """

    def __init__(self, sink: Sink, rows: int = QUEUE_ROWS, pause_s: float = PAUSE_S) -> None:
        self.name = sink.name
        self.written = 0
        self.dropped: Counter[str] = Counter()
        self._sink = sink
        self._pause_s = pause_s
        self._queue: queue.Queue[StepRow | None] = queue.Queue(rows)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, row: StepRow) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped["full"] += 1

    def close(self, timeout_s: float) -> bool:
        """Lets the sink finish what is queued; whether it did so in time. What is left then counts
        as dropped.
        """
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout_s / 2)
        except queue.Full:
            pass
        else:
            self._thread.join(timeout_s)
        finished = not self._thread.is_alive()
        if not finished:
            log.warning("sink=%s has not finished within %g s", self.name, timeout_s)
            self.dropped["full"] += sum(row is not None for row in list(self._queue.queue))
        return finished

    def _run(self) -> None:
        failures = 0
        is_open = False
        while (row := self._queue.get()) is not None:
            if failures >= MOST_FAILURES:
                self.dropped["failed"] += 1
                continue
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                self._sink.write(row)
            except Exception as error:  # noqa: BLE001 - other people's code and services: the row is lost, and counted
                failures += 1
                self.dropped["failed"] += 1
                given_up = "; given up for this session" if failures == MOST_FAILURES else ""
                log.warning(
                    "sink=%s step=%d lost: %s: %s%s",
                    self.name,
                    row.step,
                    type(error).__name__,
                    error,
                    given_up,
                )
                self._closing.wait(
                    self._pause_s * 2 ** (failures - 1) if failures < MOST_FAILURES else 0
                )
            else:
                failures = 0
                self.written += 1
        if is_open:
            self._end()

    def _end(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - as above; what was written before may be lost, which nobody can count
            log.warning("sink=%s did not close: %s: %s", self.name, type(error).__name__, error)


STEP = "step"


class WandbSink:
    """One W&B run per run of the job: sessions after a restart go on with it, by the id that lies
    in `folder`/id.
    """

    name = "wandb"

    def __init__(
        self, settings: WandbSettings, folder: Path, *, job: str, config: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._job = job
        self._config = config
        self._run: Any = None

    def open(self) -> None:
        """Raises SettingsError without the extra `wandb`, and wandb's errors without a key or a
        network.
        """
        try:
            import wandb
        except ImportError as error:
            raise SettingsError(
                "wandb is not installed here; pip install 'pipelinerl[wandb]'"
            ) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                tags=list(settings.tags) or None,
                mode=settings.mode,
                id=self._id(),
                name=self._job,
                resume="allow" if settings.mode == "online" else None,
                dir=self._folder,
                config=dict(self._config),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, init_timeout=60
                ),
            )
        except Exception:  # wandb keeps what it began, and would say that the run is in use
            wandb.teardown()
            raise
        self._run.define_metric(
            "*", step_metric=STEP
        )  # a step that is trained again may be logged again

    def write(self, row: StepRow) -> None:
        self._run.log({**row.values, STEP: row.step, "time": row.time})

    def close(self) -> None:
        self._run.finish()

    def _id(self) -> str:
        file = self._folder / "id"
        if not file.exists():
            file.write_text(secrets.token_hex(4), encoding="ascii")
        return file.read_text(encoding="ascii").strip()


class TensorBoardSink:
    """One event file per session in `folder`; each value is a scalar at its step and its time."""

    name = "tensorboard"

    def __init__(self, settings: TensorBoardSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._writer: Any = None

    def open(self) -> None:
        """Raises SettingsError without the extra `tensorboard`, OSError when the folder cannot be
        written.
        """
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise SettingsError(
                "tensorboard is not installed here; pip install 'pipelinerl[tensorboard]'"
            ) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder), flush_secs=self._settings.flush_seconds)

    def write(self, row: StepRow) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in sorted(row.values.items())
        ]
        self._writer.add_event(
            Event(wall_time=row.time, step=row.step, summary=Summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
