"""Where one step's time goes."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pipelinerl_common.metrics.catalog import PHASES

Part = TypeVar("Part")


class Phases:
    """Seconds of one step by phase, from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`; what it spends in an inner phase counts there only."""
        inner_before, began = sum(self.seconds.values()), time.monotonic()
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner_before
            self.seconds[phase] += time.monotonic() - began - inner

    def waiting_for(self, parts: Iterable[Part]) -> Iterator[Part]:
        """`parts`, each wait for the next of which counts as waiting."""
        remaining = iter(parts)
        while True:
            with self.of("wait"):
                part = next(remaining, None)
            if part is None:
                return
            yield part

    @property
    def total_s(self) -> float:
        """Since the step began."""
        return time.monotonic() - self._began
