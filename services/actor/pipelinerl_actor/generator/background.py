"""One piece of work on a thread, asked about now and then: how an engine's worker receives weights while it decodes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout

FAILURES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TransferAborted, TransferTimeout, TransferFailed, RuntimeError)
}


class BackgroundWork:
    """Runs functions one at a time. Results and failures are plain dictionaries, because they cross processes."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: dict[str, Any] = {}

    def start(self, function: Callable[[], dict[str, Any]]) -> None:
        """Raises RuntimeError while the previous one still runs."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the previous work has not ended")
        self._outcome = {}
        self._thread = threading.Thread(target=self._run, args=(function,), name="weights", daemon=True)
        self._thread.start()

    def poll(self) -> dict[str, Any] | None:
        """None while it runs; then {"result": ...} or {"failure": type, "message": ...}."""
        return self._outcome or None

    def _run(self, function: Callable[[], dict[str, Any]]) -> None:
        try:
            self._outcome = {"result": function()}
        except Exception as error:  # noqa: BLE001 - carried to the other process, where `result_of` raises it
            kind = type(error).__name__ if type(error).__name__ in FAILURES else "RuntimeError"
            message = str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
            self._outcome = {"failure": kind, "message": message}


def result_of(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of every worker. Raises the failure that explains the most: an abort is the others' echo of it."""
    failures = [outcome for outcome in outcomes if "failure" in outcome]
    for failure in sorted(failures, key=lambda each: str(each["failure"]) == TransferAborted.__name__):
        raise FAILURES[failure["failure"]](failure["message"])
    return [outcome["result"] for outcome in outcomes]


class TransferClock:
    """What the time of one transfer went into."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._load_s = 0.0

    def ready(self) -> None:
        """The worker is about to wait for the first bucket."""
        self._start = self._last = time.monotonic()

    def bucket_arrived(self) -> None:
        self._last = time.monotonic()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._load_s += time.monotonic() - start

    def seconds(self) -> dict[str, float]:
        """The fields of Received beside the checksum."""
        return {"transfer_s": self._last - self._start, "load_s": self._load_s}
