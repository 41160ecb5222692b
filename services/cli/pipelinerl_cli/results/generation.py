"""How much the actors of a run have generated, and how fast: one definition for what is shown live
and in the end.
"""

import math

from pipelinerl_cli.results.active_time import SESSION_START, ActiveTime
from pipelinerl_cli.results.counters import increase
from pipelinerl_cli.results.metrics_file import Record, ends_step
from pipelinerl_cli.results.training_time import TrainingTime

TOKENS = "tokens_generated_total"


class Generation:
    """Fed with all records of a run in their order."""

    def __init__(self) -> None:
        self.tokens = 0.0
        """By all actors, over restarts of their processes and all sessions."""
        self.time = ActiveTime()
        self.training_time = TrainingTime()
        self._counted: dict[str, float] = {}
        self._newest: float | None = None
        """When an actor last counted its tokens, in the newest session."""

    def take(self, record: Record) -> None:
        self.time.take(record)
        if SESSION_START in record.values:
            self.training_time.begin_session()
            self._newest = None
        if ends_step(record):
            self.training_time.take(_start_of_step(record), record.time)
        total = record.values.get(TOKENS, math.nan) if record.role == "actor" else math.nan
        if math.isfinite(total):
            self._count(record, total)

    def _count(self, record: Record, total: float) -> None:
        """Tokens came after the last record of an actor without them."""
        more = increase(self._counted.get(record.instance, 0.0), total)
        if more:
            self.tokens += more
            self.training_time.take(
                record.time if self._newest is None else self._newest, record.time
            )
        self._counted[record.instance] = total
        self._newest = record.time

    @property
    def tokens_per_second(self) -> float:
        """Mean over the time in which the run generated or trained. Not-a-number without tokens."""
        seconds = self.training_time.total
        return self.tokens / seconds if self.tokens > 0 and seconds > 0 else math.nan


def _start_of_step(record: Record) -> float:
    """When the trainer had the step's samples, where it tells; it may have waited for the
    generators' start before.
    """
    worked = record.values.get("step_seconds", 0.0) - record.values.get("wait_seconds", 0.0)
    return record.time - worked if worked > 0 else record.time
