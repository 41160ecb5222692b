"""Membership of the weight-transfer group: observations, the group, and the pure decision.

Level-triggered: `decide` depends only on what is true now, not on the events that led there, so a
missed event cannot leave the group wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl_common.backoff import Backoff

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class SeenGenerator:
    """A generator that answered `/health` and `/weights`."""

    name: str
    num_workers: int
    epoch: int
    """Epoch of its current group; 0 without one."""
    served_version: int
    """-1 before the first update."""
    seen_since: float
    """Monotonic time since which it has answered without interruption."""
    has_returned: bool = False
    """Whether it answered before, was unreachable, and returned: it may be lost again."""


@dataclass(frozen=True, slots=True)
class SeenTrainer:
    """Trainer rank 0 as it answered."""

    epoch: int
    """Epoch of its current group; 0 without one, as after a restart."""
    policy_version: int = 0
    num_ranks: int = 1
    """Its ranks, which are the first ones of every group."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a round of probes found."""

    now: float
    """Monotonic seconds, the clock of all times in this module."""
    trainer: SeenTrainer | None
    generators: tuple[SeenGenerator, ...]
    num_starting: int = 0
    """Generators that should exist and do not answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A generator in the group. Its workers have the ranks from `rank_offset`, behind those of the
    trainer.
    """

    name: str
    num_workers: int
    rank_offset: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A formed group. Example: 2 and 1 workers and a trainer of one rank have rank offsets 1 and 3,
    world size 4.
    """

    epoch: int
    members: tuple[Member, ...]
    num_trainer_ranks: int = 1

    @property
    def world_size(self) -> int:
        return self.num_trainer_ranks + sum(member.num_workers for member in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision to leave the group as it is, at least for now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Form:
    """The decision to form `group` in place of the current one."""

    group: WeightGroup
    reason: str


@dataclass
class MemberBackoff:
    """Excludes generators after a failure: 1 s, then twice as long each time, at most 60 s."""

    _backoffs: dict[str, Backoff] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def failed(self, name: str, now: float) -> float:
        """Excludes the generator for the returned number of seconds."""
        backoff = self._backoffs.setdefault(
            name, Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, jitter=0.0)
        )
        delay = backoff.next_delay()
        self._until[name] = now + delay
        return delay

    def succeeded(self, name: str) -> None:
        self._backoffs.pop(name, None)
        self._until.pop(name, None)

    def keep_only(self, names: Sequence[str]) -> None:
        """Forgets generators that no longer exist: the next one of that name is another process."""
        for gone in [name for name in self._backoffs if name not in names]:
            self.succeeded(gone)

    def is_out(self, name: str, now: float) -> bool:
        return now < self._until.get(name, now)


@dataclass(slots=True)
class Standing:
    """What the coordinator itself contributes to a decision."""

    group: WeightGroup | None = None
    """The last group that was formed and has not failed since."""
    transfer_deadline: float | None = None
    """Deadline of the update that is running, or None."""
    not_before: float = 0.0
    """Earliest time of the next attempt after a failure that no member caused."""
    settle_s: float = 2.0
    """Longest time that new members wait for generators that are starting, so that they join
    together; and how long a generator that returned must have stayed, so that a flapping one does
    not cause group after group.
    """
    epoch_floor: int = 0
    """The newest epoch of an earlier coordinator: epochs never decrease, not even when all
    processes have lost theirs.
    """


def assign_ranks(epoch: int, workers: Mapping[str, int], num_trainer_ranks: int = 1) -> WeightGroup:
    """The first ranks are the trainer's; the workers of the generators follow in the mapping's
    order.
    """
    members = []
    offset = num_trainer_ranks
    for name, num_workers in workers.items():
        members.append(Member(name, num_workers, offset))
        offset += num_workers
    return WeightGroup(epoch, tuple(members), num_trainer_ranks)


def decide(seen: Observation, standing: Standing, backoff: MemberBackoff) -> Wait | Form:
    """Returns what to do about the group now."""
    group = standing.group
    if seen.trainer is None:
        return Wait("the trainer does not answer")
    if standing.transfer_deadline is not None and seen.now < standing.transfer_deadline:
        return Wait("an update is running")
    ready = _ready(seen, standing, backoff)
    fault = _fault(seen.trainer, ready, group)
    if fault is None:
        return Wait("every ready generator is a member")
    if not ready and seen.trainer.epoch == 0:
        return Wait("no generator is ready")
    if seen.now < standing.not_before:
        return Wait("the last attempt failed")
    # Wait for generators that start at the same time: one group instead of one for each of them.
    if seen.num_starting and _have_just_come(ready, seen.now, standing):
        return Wait("others may join too")
    known = [seen.trainer.epoch, standing.epoch_floor, group.epoch if group else 0]
    epoch = 1 + max([*known, *(generator.epoch for generator in seen.generators)])
    workers = {generator.name: generator.num_workers for generator in ready}
    return Form(assign_ranks(epoch, workers, seen.trainer.num_ranks), fault)


def _ready(seen: Observation, standing: Standing, backoff: MemberBackoff) -> list[SeenGenerator]:
    """Generators that belong in the group: members that answer, and new members that are neither
    excluded nor only just back.
    """
    members = standing.group.names if standing.group else ()

    def is_ready(generator: SeenGenerator) -> bool:
        has_settled = (
            generator.name in members
            or not generator.has_returned
            or seen.now - generator.seen_since >= standing.settle_s
        )
        return has_settled and not backoff.is_out(generator.name, seen.now)

    return [generator for generator in seen.generators if is_ready(generator)]


def _fault(
    trainer: SeenTrainer, ready: Sequence[SeenGenerator], group: WeightGroup | None
) -> str | None:
    """Why the group must be formed again, or None."""
    if group is None:
        return "no group"
    if trainer.epoch != group.epoch:
        return f"the trainer is in epoch {trainer.epoch}, not {group.epoch}"
    by_name = {generator.name: generator for generator in ready}
    gone = [name for name in group.names if name not in by_name]
    if gone:
        return f"{', '.join(gone)} left"
    for member in group.members:
        now = by_name[member.name]
        if now.epoch != group.epoch or now.num_workers != member.num_workers:
            return f"{member.name} restarted"
    new = [name for name in by_name if name not in group.names]
    return f"{', '.join(new)} joined" if new else None


def _have_just_come(ready: Sequence[SeenGenerator], now: float, standing: Standing) -> bool:
    """Whether there are new members and none of them has waited long enough for others."""
    members = standing.group.names if standing.group else ()
    since = [generator.seen_since for generator in ready if generator.name not in members]
    return bool(since) and now - min(since) < standing.settle_s
