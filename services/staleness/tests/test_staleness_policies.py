"""Every policy under random event traces: slots conserved, bound kept, never stuck, deterministic,
recoverable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness_fakes import admit_all, finish, policy_of, train

from pipelinerl_staleness.areal import ArealSettings
from pipelinerl_staleness.conventional import ConventionalSettings
from pipelinerl_staleness.policy import Policy, PolicySettings
from pipelinerl_staleness.psrl import PsrlSettings
from pipelinerl_staleness.registry import make_policy

Event = tuple[str, int]

SETTINGS = st.one_of(
    st.builds(
        ArealSettings, eta=st.integers(0, 3), max_concurrent=st.one_of(st.none(), st.integers(1, 6))
    ),
    st.builds(ConventionalSettings, steps_per_generation=st.integers(1, 4)),
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "admit",
                "admit",
                "finish",
                "finish",
                "lose",
                "take",
                "take",
                "publish",
                "publish_twice",
                "recover",
            ]
        ),
        st.integers(0, 99),
    ),
    max_size=120,
)


@dataclass
class Driver:
    """Generators and trainer around a policy. `births` are the versions served when groups were
    admitted: the earliest that their tokens can have, and so the worst case for staleness.
    """

    policy: Policy
    step: int = 0
    served: int = 0
    births: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    decisions: list[Any] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    num_admitted: int = 0
    num_taken: int = 0
    num_lost: int = 0

    def apply(self, event: Event) -> None:
        kind, choice = event
        getattr(self, f"_{kind}")(choice)
        self.decisions.append(self.policy.may_admit())

    def _admit(self, choice: int) -> None:
        for _ in range(choice % 4 + 1):
            if not self.policy.may_admit():
                return
            self.admit()

    def admit(self) -> None:
        group = f"0-{self.num_admitted}"
        self.num_admitted += 1
        self.policy.admitted(group)
        self.policy.started(group, self.served)
        self.births[group] = self.served
        self.running.append(group)

    def _finish(self, choice: int) -> None:
        if self.running:
            group = self.running.pop(choice % len(self.running))
            self.policy.first_token(group, self.births[group])
            self.policy.last_token(group, self.served)
            self.policy.finished(group)
            self.policy.finished(group)
            self.ready.append(group)

    def _lose(self, choice: int) -> None:
        groups = self.running + self.ready
        if choice % 3 == 0 and groups:
            group = groups[choice % len(groups)]
            (self.running if group in self.running else self.ready).remove(group)
            self.policy.lost(group)
            self.policy.lost(group)
            self.num_lost += 1
        self.policy.lost("0-99999")

    def _take(self, choice: int) -> None:
        """The trainer asks for its next batch, however far the published version is behind."""
        del choice
        take = self.policy.take(self.step)
        self.decisions.append(take)
        assert bool(take.groups) != bool(take.wait_reason)
        assert not set(take.groups) & set(take.dropped)
        for group in (*take.groups, *take.dropped):
            self.ready.remove(group)
        self.num_lost += len(take.dropped)
        if take.groups:
            assert len(take.groups) == self.policy.groups_per_step
            self.staleness.extend(self.step - self.births[group] for group in take.groups)
            self.num_taken += len(take.groups)
            self.policy.step_begun(self.step)
            self.policy.step_done(self.step)
            self.step += 1

    def _publish(self, choice: int) -> None:
        """Only where the policy wants it; a slow broadcast may skip versions."""
        if choice % 2 == 0 and (self.step == 0 or self.policy.publishes_after(self.step - 1)):
            self.publish(self.step)

    def _publish_twice(self, choice: int) -> None:
        self.publish(self.served)
        self._publish(choice)

    def publish(self, version: int) -> None:
        self.served = version
        cancelled = self.policy.published(version)
        self.decisions.append(cancelled)
        for group in cancelled:
            self.running.remove(group)
        self.num_lost += len(cancelled)

    def _recover(self, choice: int) -> None:
        """The ledger's process is killed and replays what is outstanding."""
        del choice
        self.policy.recover(self.step, self.served)
        self.replay()

    def replay(self) -> None:
        outstanding = sorted(
            [*self.running, *self.ready], key=lambda group: int(group.removeprefix("0-"))
        )
        for group in outstanding:
            self.policy.admitted(group)
            self.policy.started(group, self.births[group])
        for group in self.ready:
            self.policy.first_token(group, self.births[group])
            self.policy.finished(group)


def run(
    chosen: PolicySettings,
    groups_per_step: int,
    events: Sequence[Event],
    check: Callable[[Driver], None],
) -> Driver:
    driver = Driver(make_policy(chosen, groups_per_step))
    for event in events:
        driver.apply(event)
        check(driver)
    return driver


def nothing(driver: Driver) -> None:
    del driver


def everywhere(test: Callable[[PolicySettings, int, list[Event]], None]) -> Callable[..., None]:
    given_test: Callable[..., None] = given(
        chosen=SETTINGS, groups_per_step=st.integers(1, 4), events=EVENTS
    )(test)
    return settings(max_examples=300, deadline=None)(given_test)


@everywhere
def test_slots_are_conserved(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    def check(driver: Driver) -> None:
        outstanding = driver.policy.outstanding()
        assert len(set(outstanding)) == len(outstanding)
        assert set(outstanding) == {*driver.running, *driver.ready}
        assert driver.num_admitted == driver.num_taken + driver.num_lost + len(outstanding)
        assert len(outstanding) <= driver.policy.max_outstanding()

    run(chosen, groups_per_step, events, check)


@everywhere
def test_the_promised_bound_holds(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    driver = run(chosen, groups_per_step, events, nothing)
    bound = driver.policy.bound()
    assert bound is None or max(driver.staleness, default=0) <= bound


@everywhere
def test_the_same_trace_gives_the_same_decisions(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    assert (
        run(chosen, groups_per_step, events, nothing).decisions
        == run(chosen, groups_per_step, events, nothing).decisions
    )


@everywhere
def test_a_recovery_changes_no_decision(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    without = [event for event in events if event[0] != "recover"]
    plain = run(chosen, groups_per_step, without, nothing)
    recovering = Driver(make_policy(chosen, groups_per_step))
    for event in without:
        recovering.apply(event)
        recovering.policy = make_policy(chosen, groups_per_step)
        recovering.policy.recover(recovering.step, recovering.served)
        recovering.replay()
    assert recovering.decisions == plain.decisions


@everywhere
def test_it_is_never_stuck(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    """From wherever a trace ends, a trainer that waits gets its batch once everything that may run
    has finished.
    """
    driver = run(chosen, groups_per_step, events, nothing)
    for _ in range(3):
        step = driver.step
        if step == 0 or driver.policy.publishes_after(step - 1):
            driver.publish(step)
        for _ in range(1000):
            while driver.policy.may_admit():
                driver.admit()
            driver._finish(0)
            if len(driver.ready) >= driver.policy.min_waiting() or not driver.running:
                driver._take(1)
            if driver.step > step:
                break
        assert driver.step == step + 1, (
            f"stuck at step {step}: {len(driver.running)} running, {len(driver.ready)} ready"
        )


@everywhere
def test_the_capacity_law(
    chosen: PolicySettings, groups_per_step: int, events: list[Event]
) -> None:
    """AReaL's s is eta; a generation phase of G steps is s = G-1 at its first step."""
    if isinstance(chosen, ArealSettings):
        head_start = chosen.eta
    else:
        assert isinstance(chosen, ConventionalSettings)
        head_start = chosen.steps_per_generation - 1

    def check(driver: Driver) -> None:
        assert (
            driver.num_admitted - driver.num_lost
            <= (driver.served + 1 + head_start) * groups_per_step
        )

    run(chosen, groups_per_step, events, check)


@pytest.mark.parametrize("version", [0, 3, 7])
@pytest.mark.parametrize(
    "chosen",
    [ArealSettings(eta=0), ArealSettings(eta=2), ConventionalSettings(steps_per_generation=2)],
)
def test_after_a_restart_from_a_checkpoint_it_goes_on_as_at_the_start(
    chosen: PolicySettings, version: int
) -> None:
    """Counters are rebased: the capacity at version v after v steps is that at version 0."""
    policy = make_policy(chosen, 3)
    policy.recover(version, version)
    policy.published(version)
    driver = Driver(policy, step=version, served=version)
    while policy.may_admit():
        driver.admit()
    first_phase = 2 - version % 2
    expected = 3 * (chosen.eta + 1) if isinstance(chosen, ArealSettings) else 3 * first_phase
    assert driver.num_admitted == expected
    while driver.running:
        driver._finish(0)
    assert len(policy.take(version).groups) == 3


def test_a_straggler_is_overtaken_by_areal_and_waited_for_by_conventional() -> None:
    for chosen, overtaken in (
        (ArealSettings(eta=1), True),
        (ConventionalSettings(steps_per_generation=2), False),
    ):
        driver = Driver(make_policy(chosen, 2))
        while driver.policy.may_admit():
            driver.admit()
        for _ in range(3):
            driver._finish(1)
        take = driver.policy.take(0)
        assert take.groups == (("0-1", "0-2") if overtaken else ())
        assert take.wait_reason == (
            "" if overtaken else "3 of 4 groups of the phase ready, 1 running"
        )


def test_areal_takes_the_earliest_started_of_the_finished() -> None:
    policy = make_policy(ArealSettings(eta=1), 2)
    for group in "abcd":
        policy.admitted(group)
    for group in "dbc":
        policy.finished(group)
    assert policy.take(0).groups == ("b", "c")


def test_conventional_trains_in_the_order_of_finishing_and_publishes_once_per_phase() -> None:
    policy = make_policy(ConventionalSettings(steps_per_generation=2), 2)
    for group in "abcd":
        policy.admitted(group)
    for group in "dbca":
        policy.finished(group)
    assert policy.take(0).groups == ("d", "b")
    assert not policy.may_admit()
    assert policy.take(1).groups == ("c", "a")
    assert [policy.publishes_after(step) for step in range(4)] == [False, True, False, True]
    assert not policy.may_admit()
    policy.published(2)
    assert policy.may_admit()


def test_areal_with_a_concurrency_limit_counts_running_only() -> None:
    policy = make_policy(ArealSettings(eta=3, max_concurrent=2), 2)
    policy.admitted("a")
    policy.admitted("b")
    assert not policy.may_admit()
    policy.finished("a")
    assert policy.may_admit()


def test_psrl_restores_more_groups_than_the_version_that_is_known_has_slots_for() -> None:
    policy = make_policy(PsrlSettings(eta=1), 1)
    policy.recover(1, 0)
    for group, version in (("a", 0), ("b", 1)):
        policy.admitted(group)
        policy.started(group, version)
    assert not policy.may_admit()
    policy.published(1)
    for group in "ba":
        policy.finished(group)
    assert [policy.take(step).groups for step in (1, 2)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("name", "parameters", "at_start", "after_one_step"),
    [
        ("areal", {"eta": 2}, 6, 2),
        ("skyrl", {"max_staleness_steps": 2}, 6, 2),
        ("skyrl", {"max_staleness_steps": 2, "num_workers": 3}, 3, 2),
        ("verl_drop", {"num_warmup_batches": 1.5}, 5, 2),
        ("verl_wait", {"num_warmup_batches": 0}, 2, 2),
        ("trl", {"eta": 3}, 6, 2),
        ("trl", {"eta": 0}, 2, 2),
        ("openrlhf", {"async_queue_size": 3}, 2, 2),
        ("openrlhf_article", {"async_queue_size": 3}, 6, 2),
        ("slime", {"prefetch_factor": 2}, 4, 2),
        ("slime", {"concurrency": 24, "group_size": 4, "prefetch_factor": 0.5}, 3, 2),
        ("roll", {"rho": 1}, 4, 2),
        ("dressage", {}, 2, 2),
        ("nemo_windowed", {"eta": 1, "max_buffered_rollouts": 7}, 7, 2),
        ("nemo_weight_fifo", {"eta": 1, "max_inflight_prompts": 3}, 3, 2),
        ("nemo_in_order", {"eta": 2}, 6, 2),
        ("layered", {"eta": 2}, 6, 2),
        ("psrl", {"eta": 2}, 6, 2),
        ("conventional", {"steps_per_generation": 1}, 2, 2),
        ("slack", {"eta": 3, "c_busy": 3, "c_idle": 5}, 5, 2),
    ],
)
def test_first_groups_and_refill(
    name: str, parameters: dict[str, Any], at_start: int, after_one_step: int
) -> None:
    policy = policy_of(name, **parameters)
    admitted = admit_all(policy, (f"a{i}" for i in range(100)))
    assert len(admitted) == at_start
    finish(policy, admitted[:2])
    train(policy, 0)
    assert len(admit_all(policy, (f"b{i}" for i in range(100)))) == after_one_step


def test_conventional_publishes_after_its_last_step_only() -> None:
    policy = policy_of("conventional", steps_per_generation=3)
    assert [policy.publishes_after(step) for step in range(6)] == [False, False, True] * 2
