"""What a sink is, and the thread that keeps it from holding anything up."""

import logging
import queue
import threading
from collections import Counter
from typing import Protocol

from pipelinerl_common.sinks.rows import Row

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

    def write(self, row: Row) -> None:
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
        self._queue: queue.Queue[Row | None] = queue.Queue(rows)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
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
