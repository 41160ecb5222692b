"""How much the actors of a run have generated, and how fast: one definition for what is shown live and in the end."""

import math

from pipelinerl_cli.results.active_time import ActiveTime
from pipelinerl_cli.results.counters import increase
from pipelinerl_cli.results.metrics_file import Record, ends_step

TOKENS = "tokens_generated_total"


class Generation:
    """Fed with all records of a run in their order."""

    def __init__(self) -> None:
        self.tokens = 0.0
        """By all actors, over restarts of their processes and all sessions."""
        self.time = ActiveTime()
        self._counted: dict[str, float] = {}
        self._first_token: float | None = None
        self._first_step: float | None = None
        self._newest = 0.0

    def take(self, record: Record) -> None:
        self.time.take(record)
        t = self.time.at(record.time)
        if ends_step(record) and self._first_step is None:
            self._first_step = t
        total = record.values.get(TOKENS, math.nan) if record.role == "actor" else math.nan
        if not math.isfinite(total):
            return
        before = self._newest if self._counted else t
        previous = self._counted.get(record.instance, 0.0)
        self.tokens += increase(previous, total)
        self._counted[record.instance] = total
        self._newest = t
        if self.tokens > 0 and self._first_token is None:
            self._first_token = before

    @property
    def seconds_to_first_token(self) -> float:
        """What came before is start-up. 0 where no token was generated; the first step's time where nobody counted tokens."""
        return min((t for t in (self._first_token, self._first_step) if t is not None), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        """Mean over the run, from the first token to the actors' newest record, time between sessions left out.

        Not-a-number without tokens.
        """
        seconds = self._newest - self.seconds_to_first_token
        return self.tokens / seconds if self.tokens > 0 and seconds > 0 else math.nan
