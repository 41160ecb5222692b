"""The interface of a staleness policy: a state machine driven by events, with no clock, no I/O and
no randomness.

Vocabulary (the same in the live system and in the simulator):
B   groups per optimizer step
k   number of batches taken so far, which is the step that the next batch trains
v   trainer version: optimizer steps finished
w   version that the generators serve, w <= v
birth(g)   lowest version of any first token of group g; staleness of g when trained = k - birth(g)

Order of events of one group: `admitted` -> `started` -> `first_token` and `last_token` (once per
trajectory) -> `finished` -> in a `take`; or `lost` at any time after `admitted` (failed, filtered,
expired), which returns its slot. Ties are broken by dispatch order, the order of `admitted`.

A group that is granted again, because its actor stopped, stays the same group with the same slot:
it may start again, and then the newest `started` counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The base class of every policy's own parameters. The docstring of a field has its meaning,
    its unit and the framework's name for it; its default comes with a check from `checks`.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if "check" in field.metadata:
                field.metadata["check"](field.name, getattr(self, field.name))

    @classmethod
    def parameter_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True)
class Take:
    """The decision of a `take`. `groups` is empty when the trainer must wait; `dropped` leave the
    ledger either way.

    Example: Take(groups=("0-3", "0-1"), dropped=("0-2",)).
    """

    groups: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    wait_reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of all generators over a few seconds, for policies whose admission adapts.

    Example: EngineLoad(kv_usage=0.55, num_waiting=0, num_preemptions=3, seconds=1.0).
    """

    kv_usage: float | None
    """Share of the KV blocks in use on the fullest generator, 0 to 1; None where no generator
    reports it: then no limit grows on it.
    """
    num_waiting: int
    """Requests that wait for KV blocks, all generators together."""
    num_preemptions: int
    """Preemptions since the previous report."""
    seconds: float
    """Time since the previous report."""


class Policy(ABC):
    """One staleness policy at work. Every method is an event or a question; none blocks.

    Invariant: each admitted group ends exactly once, in a `Take`, in a cancel that `published`
    returned, or in `lost`.
    """

    settings_type: ClassVar[type[PolicySettings]]
    keeps_kv: ClassVar[bool] = False
    """Whether running requests keep their KV cache when the weights change; otherwise they are
    prefilled again.
    """

    def __init__(self, settings: Any, groups_per_step: int) -> None:
        self.settings = settings
        self.groups_per_step = groups_per_step
        self.version = 0

    @abstractmethod
    def may_admit(self) -> bool:
        """Whether one more group may be generated now."""

    @abstractmethod
    def admitted(self, group: str) -> None:
        """A lease for `group` is granted: `may_admit` allowed it, or a restored ledger holds it."""

    def started(self, group: str, version: int) -> None:
        """The group's first request runs on a generator that serves `version`."""

    def first_token(self, group: str, version: int) -> None:
        """A trajectory's first token was sampled by `version`. In the live system this is only
        known when the group finishes.
        """

    def last_token(self, group: str, version: int) -> None:
        """A trajectory's last token was sampled by `version`; known when `first_token` is."""

    @abstractmethod
    def finished(self, group: str) -> None:
        """All trajectories are verified; the group waits to be taken."""

    @abstractmethod
    def lost(self, group: str) -> None:
        """The group failed or was filtered before or after it finished, which returns its slot.
        Unknown groups are ignored.
        """

    def published(self, version: int) -> tuple[str, ...]:
        """The generators serve `version` from now on (it never falls, may skip numbers, may
        repeat).

        Returns groups to cancel; they have left the policy.
        """
        self.version = max(self.version, version)
        return ()

    @abstractmethod
    def take(self, step: int) -> Take:
        """Assembles the batch for `step`. Asked again after a wait, never again once it returned
        groups for that step.
        """

    def step_begun(self, step: int) -> None:
        """The trainer has started to compute on the batch of `step`."""

    def step_done(self, step: int) -> None:
        """The optimizer step is committed."""

    def publishes_after(self, step: int) -> bool:
        """Whether the weights are to be published after `step`."""
        del step
        return True

    @abstractmethod
    def recover(self, step: int, version: int) -> None:
        """Starts over with `step` batches taken, `version` served and no group outstanding.
        `admitted` and `started` of what is still outstanding follow in dispatch order, then tokens
        and `finished` of what is ready, in the order of finishing.
        """

    @abstractmethod
    def bound(self) -> int | None:
        """The largest staleness of a trained group that the policy promises, None without one."""

    @abstractmethod
    def max_outstanding(self) -> int:
        """The most groups that can be admitted and not yet taken; it sizes queues."""

    def min_waiting(self) -> int:
        """The fewest finished groups that must be able to wait for a batch to form: a smaller ring
        buffer stalls the run.
        """
        return self.groups_per_step

    @abstractmethod
    def outstanding(self) -> Sequence[str]:
        """Groups admitted and not ended, in dispatch order."""

    def trajectory_finished(self, group: str) -> None:
        """One trajectory of a running group has stopped decoding; for policies that count them."""

    def observe(self, load: EngineLoad) -> tuple[str, ...]:
        """A load report. Returns groups to cancel; they have left the policy."""
        del load
        return ()

    def trajectory_limit(self) -> int | None:
        """The most trajectories to decode at once, None without a limit. The rest of an admitted
        group waits for a free slot.
        """
        return None

    def may_publish(self) -> bool:
        """Whether finished weights may go to the generators now; asked again after every event."""
        return True

    @property
    def streams(self) -> bool:
        """Whether groups are trained one by one as they finish, by `take_next`, with the optimizer
        step after the B-th.
        """
        return False

    def take_next(self, step: int) -> Take:
        """The next single group of the batch of `step`, or a reason to wait. After B groups the
        step is complete.
        """
        raise NotImplementedError(
            f"{type(self).__name__} assembles whole batches: use take({step})"
        )
