"""The mean of a value of the trainer's over a run, while it runs."""

import math
from array import array

from pipelinerl_cli.results.metrics_file import Record, ends_step


class StepMean:
    """Of `name` over the steps that count: what the trainer did before it went back to a checkpoint
    does not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = array("q")
        self._values = array("d")
        self._sum = 0.0

    def take(self, record: Record) -> None:
        if not ends_step(record):
            return
        while self._steps and self._steps[-1] >= record.step:
            self._steps.pop()
            self._sum -= self._values.pop()
        value = record.values.get(self._name, math.nan)
        if math.isfinite(value):
            self._steps.append(record.step)
            self._values.append(value)
            self._sum += value

    @property
    def mean(self) -> float:
        """Not-a-number without a value."""
        return self._sum / len(self._steps) if self._steps else math.nan
