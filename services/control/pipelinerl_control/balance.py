"""The balance of generation and training, computed from readings of a job's metrics.

```
r        groups/s that the trainers took: trained, or rejected for what they are
r_gen    groups/s that generation makes when nothing holds it up: those, those that came too late,
         and what piled up, divided by the time in which admission was open
r_train  groups/s that the trainers take when they never wait: r divided by the share of the time in
         which they did not wait
```
"""

import math
from dataclasses import dataclass

from pipelinerl_control.readings import Reading

LATE = ("ring_buffer", "stale", "cancelled")
"""Drop reasons of groups that the trainers did not reach in time."""
LOST = ("unfinished", "expired", "failed", "unknown", "duplicate", "rollback")
"""Drop reasons of groups that generation did not finish, or that were counted before."""
WAITING = ("stream", "ready")
"""Stages in which a finished group waits for the trainers."""
LEAST_OPEN_SHARE = 0.01
"""Smallest share of open time that is used: below it the rate of generation is unknown."""
_DROPPED = "groups_dropped_total/"


@dataclass(frozen=True, slots=True)
class Counts:
    """One reading of all counters that the balance is computed from."""

    at: float
    """Monotonic seconds."""
    step: int
    """Optimizer steps done."""
    actors: frozenset[str]
    """Ids of the actors that are ready; each start of an actor has an id of its own."""
    others: tuple[str, ...]
    """Ids of the processes that were read."""
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
        """Combines two readings; None before the first step is counted."""
        step, values = trainer.values.get("policy_version"), preprocessor.values
        if step is None:
            return None
        # Groups that were rejected for what they are count as taken: the trainers got to them.
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
        """Whether the same processes have continued to count since `begin`."""
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
    """Rates from `begin_step` to `step`, while the same `num_actors` actors were ready."""

    begin_step: int
    step: int
    num_actors: int
    r: float
    r_gen: float
    r_train: float
    """Infinite when the trainers only waited."""

    @property
    def ratio(self) -> float:
        """r / r_gen, or 0 when nothing was generated."""
        return self.r / self.r_gen if self.r_gen > 0 else 0.0


def balance_between(begin: Counts, now: Counts) -> Balance | None:
    """The balance between two counts; None before the first step. `now` must follow `begin`."""
    steps, seconds = now.step - begin.step, now.at - begin.at
    if steps == 0:
        return None
    taken, late = now.taken - begin.taken, now.late - begin.late
    # Up to one batch is queued at any time, depending on the moment of the reading.
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
    """The readings since the number of actors was last decided.

    Restarts when a process came or went, and after each decision.
    """

    def __init__(self) -> None:
        self.balance: Balance | None = None
        """Balance of the period so far; None before its first step."""
        self._ends: tuple[Counts, Counts] | None = None
        """The first and the newest reading."""

    def restart(self) -> None:
        """Starts a new period at the newest reading."""
        self._ends = None if self._ends is None else (self._ends[1], self._ends[1])
        self.balance = None

    def take(self, counts: Counts | None, last_look: int | None) -> None:
        """Takes a reading, None while there is nothing to count yet.

        `last_look` is the step of the last decision. Trainers that resumed from a checkpoint pass
        it again: a period must not contain it.
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
