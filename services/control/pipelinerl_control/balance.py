"""How generation and training are balanced, from two readings of the metrics of a job's own
processes.

```
r        groups/s that the trainers took: trained, or turned away on their own merit
r_gen    groups/s that generation makes when nothing holds it up: those, those that came too late, and what has piled up,
         over the time in which admission was open
r_train  groups/s that the trainers take when they never wait: r over the share of the time in which they did not wait
```

The readings since the last look at the balance.
"""

import math
from dataclasses import dataclass

from pipelinerl_control.readings import Reading

LATE = ("ring_buffer", "stale", "cancelled")
"""Reasons of drops by which the trainers did not get to a group in time."""
LOST = ("unfinished", "expired", "failed", "unknown", "duplicate", "rollback")
"""Reasons of drops of what generation did not make, or had made before."""
WAITING = ("stream", "ready")
"""Stages in which a finished group waits for the trainers."""
LEAST_OPEN_SHARE = 0.01
"""Of the time; below it there is no telling what generation could do."""
_DROPPED = "groups_dropped_total/"


@dataclass(frozen=True, slots=True)
class Counts:
    """One reading of everything that the balance is made of."""

    at: float
    """Monotonic seconds."""
    step: int
    """Optimizer steps done."""
    actors: frozenset[str]
    """Those that are ready, each start of one by an id of its own."""
    others: tuple[str, ...]
    """The processes that were read, likewise."""
    taken: float
    late: float
    waiting: float
    closed_s: float
    """Time in which the staleness policy let no group start though an actor asked."""
    trainer_wait_s: float

    @classmethod
    def of(
        cls,
        trainer: Reading,
        preprocessor: Reading,
        actors: frozenset[str],
        others: tuple[str, ...],
    ) -> "Counts | None":
        """None before the first step is counted."""
        step, values = trainer.values.get("policy_version"), preprocessor.values
        if step is None:
            return None
        dropped = {
            key.removeprefix(_DROPPED): count
            for key, count in values.items()
            if key.startswith(_DROPPED)
        }
        return cls(
            at=preprocessor.at,
            step=max(0, int(step)),
            actors=actors,
            others=others,
            taken=values.get("groups_trained_total", 0.0)
            + sum(count for reason, count in dropped.items() if reason not in (*LATE, *LOST)),
            late=sum(dropped.get(reason, 0.0) for reason in LATE),
            waiting=sum(values.get(f"queue_groups/{stage}", 0.0) for stage in WAITING),
            closed_s=values.get("admission_closed_seconds_total", 0.0),
            trainer_wait_s=trainer.values.get("trainer_phase_seconds_total/wait", 0.0),
        )

    def follows(self, begin: "Counts") -> bool:
        """Whether the same processes have counted on since."""
        return (
            (self.actors, self.others) == (begin.actors, begin.others)
            and self.at > begin.at
            and self.step >= begin.step
            and self.taken >= begin.taken
            and self.late >= begin.late
            and self.closed_s >= begin.closed_s
            and self.trainer_wait_s >= begin.trainer_wait_s
        )


@dataclass(frozen=True, slots=True)
class Balance:
    """Over the steps from `begin_step` to `step`, during which the same `num_actors` actors were
    ready.
    """

    begin_step: int
    step: int
    num_actors: int
    r: float
    r_gen: float
    r_train: float
    """Infinite when the trainers did nothing but wait."""

    @property
    def ratio(self) -> float:
        """r / r_gen, or 0 when nothing was generated."""
        return self.r / self.r_gen if self.r_gen > 0 else 0.0


def balance_between(begin: Counts, now: Counts) -> Balance | None:
    """`now` follows `begin`. None before the first step between the two."""
    steps, seconds = now.step - begin.step, now.at - begin.at
    if steps == 0:
        return None
    taken, late = now.taken - begin.taken, now.late - begin.late
    # Up to one batch lies there at any time, according to when one looks.
    piled_up = max(0.0, now.waiting - begin.waiting - taken / steps)
    open_s = max(seconds - (now.closed_s - begin.closed_s), LEAST_OPEN_SHARE * seconds)
    busy_s = seconds - (now.trainer_wait_s - begin.trainer_wait_s)
    return Balance(
        begin_step=begin.step,
        step=now.step,
        num_actors=len(now.actors),
        r=taken / seconds,
        r_gen=(taken + late + piled_up) / open_s,
        r_train=taken / busy_s if busy_s > 0 else math.inf,
    )


class Period:
    """Grows with every reading; begins anew when a process came or went, and after each look."""

    def __init__(self) -> None:
        self.balance: Balance | None = None
        """Over the period so far; None before its first step."""
        self._ends: tuple[Counts, Counts] | None = None
        """The first and the newest reading."""

    def begin_anew(self) -> None:
        """With the newest reading."""
        self._ends = None if self._ends is None else (self._ends[1], self._ends[1])
        self.balance = None

    def take(self, counts: Counts | None, last_look: int | None) -> None:
        """A reading, None where there is nothing to count yet. `last_look` is the step of the last
        look.

        Trainers that have gone back to a checkpoint pass that step again: it cannot lie within a
        period.
        """
        if counts is None:
            self._ends = self.balance = None
            return
        begin = (
            self._ends[0] if self._ends is not None and counts.follows(self._ends[1]) else counts
        )
        if last_look is not None and begin.step < last_look <= counts.step:
            begin = counts
        self._ends = (begin, counts)
        self.balance = balance_between(begin, counts)
