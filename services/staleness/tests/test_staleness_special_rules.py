"""The special rule of each policy, on traces made by hand. Two groups per step unless said
otherwise.
"""

import ast
import inspect
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from pipelinerl_staleness.policy import EngineLoad, Policy, Take
from pipelinerl_staleness.registry import POLICIES, make_policy, parse_policy_settings

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


class TestAdmission:
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
        self, name: str, parameters: dict[str, Any], at_start: int, after_one_step: int
    ) -> None:
        policy = policy_of(name, **parameters)
        admitted = admit_all(policy, (f"a{i}" for i in range(100)))
        assert len(admitted) == at_start
        finish(policy, admitted[:2])
        train(policy, 0)
        assert len(admit_all(policy, (f"b{i}" for i in range(100)))) == after_one_step

    def test_prime_rl_starts_with_one_batch_and_grows_only_when_quiet(self) -> None:
        policy = policy_of("prime_rl", group_size=2, max_inflight=64)
        names = [f"g{i}" for i in range(400)]
        running = admit_all(policy, names)
        assert len(running) == 2
        for index in range(60):
            policy.observe(QUIET)
            first = running.pop(0)
            for _ in range(2):
                policy.trajectory_finished(first)
            finish(policy, [first])
            if policy.take(policy.version).groups:
                policy.published(policy.version + 1)
            running += admit_all(policy, names[(index + 1) * 5 :], limit=5)
        assert len(running) > 4
        held = len(running) * 2
        policy.observe(EngineLoad(kv_usage=0.85, num_waiting=0, num_preemptions=0, seconds=5.0))
        assert policy.trajectory_limit() == int(held * 0.7 / 0.85)

    def test_prime_rl_cancels_the_youngest_when_blocks_run_out(self) -> None:
        policy = policy_of("prime_rl", groups_per_step=4, group_size=2)
        running = admit_all(policy, "abcd")
        assert policy.observe(
            EngineLoad(kv_usage=0.95, num_waiting=3, num_preemptions=2, seconds=5.0)
        ) == ("d",)
        assert running == ["a", "b", "c", "d"]

    def test_prime_rl_admits_at_most_one_version_behind(self) -> None:
        policy = policy_of("prime_rl", groups_per_step=1, eta=4, group_size=1, initial_inflight=8)
        finish(policy, admit_all(policy, ["a", "b"]))
        assert policy.take(0).groups == ("a",)
        assert policy.may_admit()
        assert policy.take(1).groups == ("b",)
        assert not policy.may_admit()  # step 2 is collected, version 0 is served
        policy.published(1)
        assert policy.may_admit()

    def test_trl_counts_running_work_only(self) -> None:
        policy = policy_of("trl", eta=1, queue_groups=5)
        for batch in ("ab", "cd", "e"):
            finish(policy, admit_all(policy, batch))
        assert not policy.may_admit()  # five finished groups fill the queue
        assert policy.take(0).groups == ("a", "b")
        assert policy.may_admit()

    def test_trl_frees_slots_trajectory_by_trajectory(self) -> None:
        policy = policy_of("trl", eta=1, slots="trajectory", group_size=2)
        assert policy.trajectory_limit() == 4
        assert admit_all(policy, "abcd") == ["a", "b"]
        policy.trajectory_finished("a")
        assert admit_all(policy, "cd") == ["c"]
        policy.lost("b")
        assert admit_all(policy, "de") == ["d"]

    def test_openrlhf_generates_one_batch_at_a_time_and_holds_the_publish(self) -> None:
        policy = policy_of("openrlhf", async_queue_size=2)
        assert admit_all(policy, "abcdef") == ["a", "b"]
        finish(policy, "ab")
        assert admit_all(policy, "cdef") == ["c", "d"]
        assert not policy.may_publish()
        finish(policy, "c")
        assert not policy.may_admit()
        assert train(policy, 0, publish=False).groups == ("a", "b")
        finish(policy, "d")
        assert policy.may_publish()
        assert not policy.may_admit()  # weights wait: no batch may mix versions
        policy.published(1)
        assert admit_all(policy, "ef") == ["e", "f"]

    def test_openrlhf_partial_rollout_publishes_at_once(self) -> None:
        policy = policy_of("openrlhf", partial_rollout=True)
        admit_all(policy, "ab")
        assert policy.may_publish()

    def test_openrlhf_replaces_a_failed_group_inside_its_batch(self) -> None:
        policy = policy_of("openrlhf")
        admit_all(policy, "ab")
        finish(policy, "a")
        policy.lost("b")
        assert policy.take(0).groups == ()
        finish(policy, admit_all(policy, "cd"))
        assert policy.take(0).groups == ("a", "c")

    def test_slime_gates_on_running_and_on_waiting_groups(self) -> None:
        policy = policy_of("slime", prefetch_factor=1)
        finish(policy, admit_all(policy, "ab"))
        assert not policy.may_admit()
        policy.take(0)
        assert admit_all(policy, "cde") == ["c", "d"]
        assert not policy.may_publish()  # the next batch is not complete
        finish(policy, "cd")
        assert policy.may_publish()

    def test_conventional_publishes_after_its_last_step_only(self) -> None:
        policy = policy_of("conventional", steps_per_generation=3)
        assert [policy.publishes_after(step) for step in range(6)] == [False, False, True] * 2


class TestBatch:
    def test_areal_takes_earliest_started_and_skyrl_earliest_finished(self) -> None:
        areal, skyrl = policy_of("areal", eta=1), policy_of("skyrl", max_staleness_steps=1)
        for policy in (areal, skyrl):
            admit_all(policy, "abcd")
            finish(policy, "dcb")
        assert areal.take(0).groups == ("b", "c")
        assert skyrl.take(0).groups == ("d", "c")

    def test_openrlhf_article_decides_as_areal(self) -> None:
        rng = random.Random(4)
        one, other = policy_of("areal", eta=2), policy_of("openrlhf_article", async_queue_size=3)
        running: list[str] = []
        for index in range(2000):
            assert one.may_admit() == other.may_admit()
            if one.may_admit() and rng.random() < 0.5:
                running.append(f"g{index}")
                one.admitted(running[-1])
                other.admitted(running[-1])
            elif running and rng.random() < 0.8:
                name = running.pop(rng.randrange(len(running)))
                one.finished(name)
                other.finished(name)
            else:
                taken = one.take(one.version).groups
                assert taken == other.take(other.version).groups
                for policy in (one, other):
                    policy.published(policy.version + bool(taken))
        assert one.version > 100

    def test_skyrl_counts_violations_and_trains_them(self) -> None:
        policy = policy_of("skyrl", max_staleness_steps=1)
        admit_all(policy, "abcd")
        finish(policy, "ab")
        train(policy, 0)
        finish(policy, admit_all(policy, "ef"))
        train(policy, 1)
        finish(policy, [*"cd", *admit_all(policy, "gh")])
        assert train(policy, 2).groups == ("c", "d")
        assert policy.num_violations == 2  # type: ignore[attr-defined]

    def test_verl_drop_evicts_finished_groups_and_refills_one_for_one(self) -> None:
        policy = policy_of("verl_drop", eta=1, num_warmup_batches=1)
        admit_all(policy, "abcd")
        finish(policy, "abc")
        train(policy, 0)
        assert admit_all(policy, "efgh") == ["e", "f"]
        taken = policy.take(1)
        assert (taken.groups, taken.dropped) == ((), ("c",))
        assert admit_all(policy, "gh") == ["g"]
        finish(policy, "gd")  # d still runs at span 2 and is evicted only when finished
        finish(policy, "f")
        taken = policy.take(1)
        assert (taken.groups, taken.dropped) == (("f", "g"), ("d",))

    def test_verl_wait_waits_for_running_groups_at_the_threshold(self) -> None:
        policy = policy_of("verl_wait", eta=2, num_warmup_batches=1)
        admit_all(policy, "abcd")
        finish(policy, "ab")
        train(policy, 0)
        finish(policy, admit_all(policy, "ef"))
        assert policy.take(1).groups == ()
        finish(policy, "d")
        assert policy.take(1).groups == ()
        finish(policy, "c")
        assert policy.take(1).groups == ("c", "d")

    @pytest.mark.parametrize("name", ["verl_drop", "verl_wait"])
    def test_verl_counts_the_newest_start_of_a_group_granted_again(self, name: str) -> None:
        policy = policy_of(name, eta=3, num_warmup_batches=1)
        admit_all(policy, "abcd")
        policy.published(1)
        policy.started("a", 1)
        finish(policy, "acbd")
        assert policy.take(1).groups == ("b", "c")

    @pytest.mark.parametrize("warmup", [1, 2, 3])
    @pytest.mark.parametrize("eta", [1, 2, 3, 4])
    def test_verl_wait_bound_is_attained(self, warmup: int, eta: int) -> None:
        """Nothing but the first B groups is fast until the check blocks; then everything finishes
        at once.
        """
        policy = policy_of("verl_wait", groups_per_step=1, eta=eta, num_warmup_batches=warmup)
        births = {}
        oldest = step = 0
        for number in range(400):
            if policy.may_admit():
                births[f"g{number}"] = policy.version
                policy.admitted(f"g{number}")
                continue
            newest = [*policy.outstanding()][-1]
            policy.finished(newest)
            taken = policy.take(step)
            if not taken.groups:
                for group in policy.outstanding():
                    policy.finished(group)
                taken = policy.take(step)
            oldest = max(oldest, step - births[taken.groups[0]])
            step += 1
            policy.published(step)
        assert oldest == policy.bound() == max(warmup, eta + warmup - 2)

    def test_trl_drops_at_the_head_of_the_queue_only(self) -> None:
        policy = policy_of("trl", eta=1)
        finish(policy, admit_all(policy, "ab"))
        finish(policy, admit_all(policy, "cd"))
        train(policy, 0)
        policy.published(2)  # as if step 1 had trained something else
        finish(policy, admit_all(policy, "ef"))
        taken = policy.take(2)
        assert (taken.groups, taken.dropped) == (("e", "f"), ("c", "d"))

    def test_trl_prefetch_checks_one_version_early(self) -> None:
        policy = policy_of("trl", eta=0, prefetch=True)
        finish(policy, admit_all(policy, "ab"))
        policy.published(1)
        assert policy.take(1).groups == ("a", "b")
        assert policy.bound() == 1

    def test_roll_cancels_at_the_publish_and_takes_oldest_start_first(self) -> None:
        policy = policy_of("roll", rho=1)
        admit_all(policy, "abcd")
        finish(policy, "ab")
        train(policy, 0)
        finish(policy, admit_all(policy, "ef"))
        finish(policy, "d")
        assert train(policy, 1, publish=False).groups == ("d", "e")
        assert policy.published(2) == ("c",)

    def test_roll_drops_what_finished_too_late(self) -> None:
        policy = policy_of("roll", rho=1)
        admit_all(policy, "abcd")
        finish(policy, "abc")
        train(policy, 0)
        finish(policy, admit_all(policy, "ef"))
        policy.published(2)
        finish(policy, admit_all(policy, "gh"))
        assert policy.take(2) == Take(groups=("e", "f"), dropped=("c",))

    def test_roll_rlvr_blocks_on_the_older_start_step_and_equals_weight_fifo(self) -> None:
        for policy in (policy_of("roll_rlvr", rho=1), policy_of("nemo_weight_fifo", eta=1)):
            admit_all(policy, "abcd")
            finish(policy, "ab")
            train(policy, 0)
            finish(policy, [*admit_all(policy, "ef"), "d"])
            assert policy.take(1).groups == ()
            finish(policy, "c")
            assert policy.take(1).groups == ("c", "d")

    def test_prime_rl_cancels_and_sweeps(self) -> None:
        policy = policy_of("prime_rl", groups_per_step=1, eta=1, group_size=1, initial_inflight=3)
        admit_all(policy, "abc")
        finish(policy, "ab")
        assert policy.take(0).groups == ("a",)
        assert policy.published(1) == ()
        finish(policy, admit_all(policy, "d"))
        assert policy.take(1).groups == ("b",)
        assert policy.published(2) == ("c",)
        policy.published(3)
        finish(policy, admit_all(policy, "e"))
        assert policy.take(3) == Take(groups=("e",), dropped=("d",))

    def test_dressage_group_scope_looks_at_the_last_end_version(self) -> None:
        policy = policy_of("dressage", keep_versions=1, max_active=4)
        admit_all(policy, "abcd")
        for group, ends in (("a", [0, 0]), ("b", [0, 1]), ("c", [1])):
            for version in ends:
                policy.last_token(group, version)
            policy.finished(group)
        assert policy.take(1) == Take(groups=("b", "c"), dropped=("a",))

    def test_dressage_trajectory_scope_drops_for_any_early_end(self) -> None:
        policy = policy_of("dressage", keep_versions=1, max_active=4, scope="trajectory")
        admit_all(policy, "abcd")
        for group, ends in (("b", [0, 1]), ("c", [1]), ("d", [1])):
            for version in ends:
                policy.last_token(group, version)
            policy.finished(group)
        assert policy.take(1) == Take(groups=("c", "d"), dropped=("b",))

    def test_dressage_orders_versions_by_first_sight(self) -> None:
        policy = policy_of("dressage", keep_versions=1, max_active=4)
        admit_all(policy, "abcd")
        for group, end in (
            ("a", 5),
            ("b", 3),
            ("c", 3),
        ):  # 3 is seen after 5 and counts as the newer one
            finish(policy, group, end)
        assert policy.take(5) == Take(groups=("b", "c"), dropped=("a",))

    def test_dressage_keeps_unlabelled_groups(self) -> None:
        policy = policy_of("dressage", keep_versions=1, max_active=4)
        admit_all(policy, "abc")
        policy.finished("a")
        finish(policy, "bc", -1)
        assert policy.take(0).groups == ("a", "b")

    def test_dressage_limits_version_switches(self) -> None:
        policy = policy_of("dressage", max_version_switches=1)
        admit_all(policy, "ab")
        policy.first_token("a", 0)
        assert policy.published(1) == ()
        policy.first_token("b", 1)
        assert policy.published(2) == ("a",)

    def test_nemo_windowed_cancels_evicts_and_may_prefer_fresh(self) -> None:
        for freshest, expected in ((False, ("d", "e")), (True, ("e", "f"))):
            policy = policy_of(
                "nemo_windowed", eta=1, max_buffered_rollouts=6, sample_freshest_first=freshest
            )
            admit_all(policy, "abc")
            finish(policy, "a")
            policy.published(1)
            finish(policy, admit_all(policy, "d"))
            assert policy.published(2) == ("b", "c")
            finish(policy, admit_all(policy, "ef"))
            assert policy.take(2) == Take(groups=expected, dropped=("a",))

    def test_nemo_ready_first_overtakes_and_in_order_does_not(self) -> None:
        ready_first, in_order = policy_of("nemo_ready_first"), policy_of("nemo_in_order")
        for policy in (ready_first, in_order):
            admit_all(policy, "abcd")
            finish(policy, "dcb")
        assert ready_first.take(0).groups == ("b", "c")
        assert in_order.take(0).groups == ()
        finish(in_order, "a")
        assert in_order.take(0).groups == ("a", "b")

    def test_in_order_promotes_when_a_group_is_lost(self) -> None:
        policy = policy_of("nemo_in_order")
        admit_all(policy, "abcd")
        policy.lost("a")
        finish(policy, "bc")
        assert policy.take(0).groups == ("b", "c")

    def test_weight_fifo_completes_a_small_class_from_the_next(self) -> None:
        policy = policy_of("nemo_weight_fifo", eta=1, max_inflight_prompts=1)
        finish(policy, admit_all(policy, "a"))
        policy.published(1)
        finish(policy, admit_all(policy, "b"))
        assert policy.take(1).groups == ("a", "b")

    def test_layered_filter_and_cancel_are_independent(self) -> None:
        outcomes = {}
        for layer2 in (False, True):
            for layer3 in (False, True):
                policy = policy_of("layered", eta=1, layer2=layer2, layer3=layer3)
                admit_all(policy, "abcd")
                finish(policy, "abc")
                train(policy, 0)
                admit_all(policy, "ef")
                cancelled = policy.published(2)
                finish(policy, [*admit_all(policy, "gh"), "e", "f"])
                outcomes[layer2, layer3] = (cancelled, policy.take(2).dropped)
        assert outcomes == {
            (False, False): ((), ()),
            (False, True): ((), ("c",)),
            (True, False): (("d",), ()),
            (True, True): (("d",), ("c",)),
        }

    def test_psrl_reserves_late_and_occupies_early(self) -> None:
        policy = policy_of("psrl", groups_per_step=1, eta=2)
        admit_all(policy, "abc")  # slots 2, 1, 0
        finish(policy, "a")  # c moves to slot 2, a occupies slot 0
        assert train(policy, 0).groups == ("a",)
        assert admit_all(policy, "d") == ["d"]  # slot 3
        finish(policy, "d")  # b may not live in slot 3: d keeps its own
        assert policy.take(1).groups == ()
        finish(policy, "c")
        assert train(policy, 1).groups == ("c",)

    def test_psrl_fills_the_hole_of_a_failed_group(self) -> None:
        policy = policy_of("psrl", groups_per_step=1, eta=1)
        admit_all(policy, "ab")
        finish(policy, "ba")
        policy.lost("b")
        assert policy.take(0).groups == ("a",)


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "parameters", "message"),
        [
            ("trl", {"eta": -1}, "eta=-1 must be a whole number of at least 0"),
            ("trl", {"eta": True}, "eta=True"),
            ("trl", {"slots": "row"}, "slots='row' must be one of group, trajectory"),
            ("verl_drop", {"eta": 0}, "eta=0 must be a whole number of at least 1"),
            ("verl_wait", {"num_warmup_batches": float("nan")}, "num_warmup_batches=nan"),
            ("openrlhf", {"async_queue_size": 0}, "async_queue_size=0"),
            ("slime", {"prefetch_factor": 0}, "prefetch_factor=0 must be a number above 0"),
            (
                "prime_rl",
                {"min_inflight": 9, "max_inflight": 8},
                "max_inflight=8 must be a whole number of at least 9",
            ),
            ("layered", {"layer2": 1}, "layer2=1 must be true or false"),
            ("slack", {"stream": "yes"}, "stream='yes'"),
            ("roll", {"rho": 0.5}, "rho=0.5"),
        ],
    )
    def test_refused(self, name: str, parameters: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_policy_settings(name, parameters)

    @pytest.mark.parametrize(
        ("name", "parameters", "message"),
        [
            (
                "skyrl",
                {"max_staleness_steps": 1, "num_workers": 5},
                "num_workers=5 must be between the 2 groups of a step and 4",
            ),
            (
                "nemo_in_order",
                {"eta": 2, "max_buffered_rollouts": 5},
                "max_buffered_rollouts=5 must be at least 6",
            ),
            ("slack", {"c_idle": 1}, "c_idle=1 must be at least the 2"),
            ("prime_rl", {"max_ready": 1}, "max_ready=1 must be at least the 2"),
        ],
    )
    def test_refused_for_the_batch(
        self, name: str, parameters: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            policy_of(name, **parameters)

    def test_every_parameter_has_a_documented_meaning(self) -> None:
        for settings_type in POLICIES.values():
            for ancestor in settings_type.__mro__[:-2]:
                tree = ast.parse(inspect.getsource(sys.modules[ancestor.__module__]))
                body = next(
                    node
                    for node in tree.body
                    if isinstance(node, ast.ClassDef) and node.name == ancestor.__name__
                ).body
                for field, after in pairwise(body):
                    if isinstance(field, ast.AnnAssign):
                        assert isinstance(after, ast.Expr), (
                            f"{ancestor.__name__}: {ast.unparse(field)} has no docstring"
                        )

    def test_batch_policies_do_not_stream(self) -> None:
        policy = policy_of("areal")
        assert not policy.streams
        with pytest.raises(NotImplementedError, match="take"):
            policy.take_next(0)
