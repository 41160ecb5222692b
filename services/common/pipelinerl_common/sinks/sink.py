"""Sinks and what feeds them: rows of metrics, one per optimizer step; a thread for each sink;
Weights & Biases and TensorBoard.
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
from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import TRAINER
from pipelinerl_common.settings import TensorBoardSettings, WandbSettings

log = logging.getLogger(__name__)

QUEUE_ROWS = 256
MOST_FAILURES = 6
"""Consecutive failures after which the sink is given up for this session."""
PAUSE_S = 2.0
"""Pause after a failure; it doubles with each consecutive one, so that an outage of the network of
a minute is bridged.
"""
_LABELS = re.compile(r"\{(.*)\}$")
_MARK = "reward_mean"
"""A metric that only records at the end of a step have."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """All metrics at the end of a step. Example: StepRow(12, 1764446400.5, {"trainer/ess": 0.97,
    "actor/memory_bytes": 2e8}).
    """

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


class RowBuilder:
    """Joins the records of a job's processes: holds the newest values of each process, adds up
    those of a role, and averages its means and ratios.
    """

    def __init__(self, since: float) -> None:
        """Records older than `since` (seconds since 1970) are skipped: an earlier process has
        written them.
        """
        self._since = since
        self._newest: dict[tuple[str, str], dict[str, float]] = {}

    def take(self, record: MetricsRecord) -> StepRow | None:
        """Takes a record in; returns the row when it ends a step."""
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
    """A name with labels as a path: "queue_groups{stage=ready}" becomes "queue_groups/ready"."""
    labels = _LABELS.search(name)
    if labels is None:
        return name
    return "/".join(
        [name[: labels.start()], *(label.partition("=")[2] for label in labels[1].split(","))]
    )


class Sink(Protocol):
    """A destination of rows. Its methods are called one after another from one thread; they may
    block or raise anything.
    """

    name: str

    def open(self) -> None:
        """Called before the first row."""

    def write(self, row: StepRow) -> None:
        """Writes one row. Steps increase, except when they are trained again after a rollback."""

    def close(self) -> None:
        """Called after the last row; makes sure that everything is written."""


class SinkThread:
    """Feeds one sink from a bounded queue. Rows that are lost are counted by reason:

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
        """Queues a row without waiting; a full queue drops it."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped["full"] += 1

    def close(self, timeout_s: float) -> bool:
        """Waits until the sink has written what is queued; returns whether it did so in time. The
        remaining rows count as dropped.
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
        backoff = Backoff(self._pause_s, math.inf, jitter=0)
        is_open = False
        while (row := self._queue.get()) is not None:
            if backoff.num_failures >= MOST_FAILURES:
                self.dropped["failed"] += 1
                continue
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                self._sink.write(row)
            except Exception as error:  # noqa: BLE001 - foreign libraries and services: the row is lost, and counted
                pause_s = backoff.next_delay()
                is_given_up = backoff.num_failures == MOST_FAILURES
                self.dropped["failed"] += 1
                log.warning(
                    "sink=%s step=%d lost: %s: %s%s",
                    self.name,
                    row.step,
                    type(error).__name__,
                    error,
                    "; given up for this session" if is_given_up else "",
                )
                # An event instead of a sleep, so that `close` does not wait for the pause.
                self._closing.wait(0 if is_given_up else pause_s)
            else:
                backoff.reset()
                self.written += 1
        if is_open:
            self._end()

    def _end(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - as above; rows that were written may be lost uncounted
            log.warning("sink=%s did not close: %s: %s", self.name, type(error).__name__, error)


STEP = "step"


class WandbSink:
    """Weights & Biases: one W&B run per run of the job. Sessions after a restart continue it by the
    id that is stored in `folder`/id.
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
        except Exception:  # wandb keeps the failed run and would report it as in use
            wandb.teardown()
            raise
        # With a step of our own, a step that is trained again may be logged again.
        self._run.define_metric("*", step_metric=STEP)

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
    """TensorBoard event files, one per session in `folder`; each value is a scalar at its step and
    time.
    """

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
