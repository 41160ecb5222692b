"""In-process fakes of what surrounds a policy: generators, a trainer and arbitrary events, with
checks of what every policy must keep; and one-line calls for traces made by hand.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_staleness.policy import EngineLoad, Policy, Take
from pipelinerl_staleness.registry import make_policy, parse_policy_settings

GROUP_SIZE = 2
QUIET = EngineLoad(kv_usage=0.3, num_waiting=0, num_preemptions=0, seconds=5.0)


def policy_of(name: str, groups_per_step: int = 2, **parameters: Any) -> Policy:
    return make_policy(parse_policy_settings(name, parameters), groups_per_step)


def admit_all(policy: Policy, names: Iterable[str], limit: int = 100) -> list[str]:
    """Admits from `names` while the policy allows; returns those that got in."""
    admitted: list[str] = []
    for name in names:
        if len(admitted) == limit or not policy.may_admit():
            break
        policy.admitted(name)
        policy.started(name, policy.version)
        admitted.append(name)
    return admitted


def finish(policy: Policy, names: Iterable[str], end_version: int | None = None) -> None:
    for name in names:
        policy.last_token(name, policy.version if end_version is None else end_version)
        policy.finished(name)


def train(policy: Policy, step: int, publish: bool = True) -> Take:
    taken = policy.take(step)
    assert taken.groups, taken.wait_reason
    policy.step_begun(step)
    policy.step_done(step)
    if publish:
        policy.published(step + 1)
    return taken


@dataclass
class FakeGroup:
    """A group of the generators: the versions served at its admission and at its tokens."""

    admission: int
    first_tokens: list[int] = field(default_factory=list)
    last_token: int = -1

    @property
    def birth(self) -> int:
        return min(self.first_tokens)


class FakeRun:
    """Generators that serve version `served`, a trainer at step `step`, and the history of each
    group. It counts the groups itself and compares with the policy after every event.
    """

    def __init__(
        self, name: str, parameters: dict[str, Any], groups_per_step: int, lagging: bool = False
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.batch = groups_per_step
        self.lagging = lagging
        self.policy = self._new_policy()
        self.running: dict[str, FakeGroup] = {}
        self.ready: dict[str, FakeGroup] = {}
        self.dispatched: list[str] = []
        self.in_training: dict[str, FakeGroup] = {}
        self.training = False
        self.step = 0
        self.served = 0
        self.publishable = 0
        self.log: list[object] = []
        self.oldest = 0
        self.num_returned = 0

    def _new_policy(self) -> Policy:
        return make_policy(parse_policy_settings(self.name, self.parameters), self.batch)

    def event(self, byte: int) -> None:
        """Applies an arbitrary byte: its low half says which event, its high half which group or
        how many.
        """
        kind, argument = byte % 16, byte // 16
        if kind <= 3:
            self.admit(argument % 4 + 1)
        elif kind <= 5:
            self.sample_first_token(argument)
        elif kind <= 9:
            self.finish(argument)
        elif kind == 10:
            self.lose(argument)
        elif kind <= 12:
            self.train()
        elif kind <= 14:
            self.publish(again=argument == 0)
        else:
            self.observe(argument)
        self.check_books()

    def admit(self, limit: int) -> int:
        number = 0
        while number < limit and self.policy.may_admit():
            group = f"g{len(self.dispatched)}"
            self.dispatched.append(group)
            self.policy.admitted(group)
            self.policy.started(group, self.served)
            self.running[group] = FakeGroup(self.served)
            number += 1
        return number

    def sample_first_token(self, index: int) -> None:
        waiting = [
            name for name, group in self.running.items() if len(group.first_tokens) < GROUP_SIZE
        ]
        if waiting:
            name = waiting[index % len(waiting)]
            self.running[name].first_tokens.append(self.served)
            self.policy.first_token(name, self.served)

    def finish(self, index: int) -> None:
        if not self.running:
            return
        name = list(self.running)[index % len(self.running)]
        group = self.running[name]
        while len(group.first_tokens) < GROUP_SIZE:
            group.first_tokens.append(self.served)
            self.policy.first_token(name, self.served)
        for _ in range(GROUP_SIZE):
            self.policy.trajectory_finished(name)
        group.last_token = self.served
        self.policy.last_token(name, self.served)
        self.policy.finished(name)
        self.policy.finished(name)  # a duplicate report changes nothing
        self.ready[name] = self.running.pop(name)

    def lose(self, index: int) -> None:
        names = [*self.running, *self.ready]
        if names:
            name = names[index % len(names)]
            self.policy.lost(name)
            self.policy.lost(name)  # a duplicate report returns no second credit
            self.running.pop(name, None)
            self.ready.pop(name, None)

    def train(self) -> None:
        """Ends the step in training, or takes the next groups."""
        if self.training and len(self.in_training) == self.batch:
            self.in_training.clear()
            self.training = False
            self.policy.step_done(self.step)
            if self.policy.publishes_after(self.step):
                self.publishable = self.step + 1
            self.step += 1
        elif self.lagging or self.served >= self.publishable:
            taken = (
                self.policy.take_next(self.step)
                if self.policy.streams
                else self.policy.take(self.step)
            )
            self._check_take(taken)

    def _check_take(self, taken: Take) -> None:
        self.log.append(taken)
        assert len({*taken.groups, *taken.dropped}) == len(taken.groups) + len(taken.dropped)
        assert bool(taken.groups) != bool(taken.wait_reason)
        for name in taken.dropped:
            del self.ready[name]
        for name in taken.groups:
            group = self.ready.pop(name)
            self.in_training[name] = group
            age = self.step - group.birth
            self.oldest = max(self.oldest, age)
            bound = self.policy.bound()
            assert bound is None or age <= bound, (
                f"{name} born at {group.birth} is trained at step {self.step}"
            )
        if taken.groups:
            assert len(taken.groups) == (1 if self.policy.streams else self.batch)
            if not self.training:
                self.policy.step_begun(self.step)
            self.training = True

    def publish(self, again: bool = False) -> None:
        if self.publishable > self.served and self.policy.may_publish():
            self.served = self.publishable
        elif not again:
            return
        cancelled = self.policy.published(self.served)
        self.log.append(cancelled)
        for name in cancelled:
            del self.running[name]

    def observe(self, argument: int) -> None:
        load = EngineLoad(
            kv_usage=argument / 16,
            num_waiting=argument % 3,
            num_preemptions=argument % 2,
            seconds=2.0,
        )
        for name in self.policy.observe(load):
            del self.running[name]

    def check_books(self) -> None:
        known = {*self.running, *self.ready}
        assert set(self.policy.outstanding()) == known
        assert (
            len(self.policy.outstanding())
            == len(known)
            <= self.policy.max_outstanding() + self.num_returned
        )

    def restart(self, behind: int = 0) -> None:
        """The controller crashes: the batch in training is returned, a new policy is filled from
        the ledger, which knows the served version, or the one `behind` versions before it and
        receives the newest once it is filled.
        """
        self.num_returned = len(self.in_training)
        self.ready = {**self.in_training, **self.ready}
        self.in_training = {}
        self.training = False
        self.policy = self._new_policy()
        self.policy.recover(self.step, max(0, self.served - behind))
        everything = {**self.running, **self.ready}
        for name in sorted(everything, key=self.dispatched.index):
            self.policy.admitted(name)
            self.policy.started(name, everything[name].admission)
            for version in everything[name].first_tokens:
                self.policy.first_token(name, version)
        for name, group in self.ready.items():
            self.policy.last_token(name, group.last_token)
            self.policy.finished(name)
        if behind:
            self.publish(again=True)
        self.check_books()

    def run_steps(self, number: int, max_rounds_per_step: int = 60) -> None:
        """Finishes every running group and polls for the trainer until `number` more steps have
        been trained.
        """
        goal = self.step + number
        rounds = 0
        while self.step < goal:
            rounds += 1
            assert rounds < max_rounds_per_step * number, (
                f"stuck at step {self.step}: {self.log[-1]}"
            )
            self.observe(0)
            self.admit(1000)
            for index in range(len(self.running)):
                self.finish(index * 7)
            self.train()
            self.publish()
            self.check_books()
