"""prime-rl's adaptive cap, lag gate, cancelling and sweep.

There are two groups per step unless the test says otherwise.
"""

from staleness_fakes import QUIET, admit_all, finish, policy_of

from pipelinerl_staleness.policy import EngineLoad, Take


def test_prime_rl_starts_with_one_batch_and_grows_only_when_quiet() -> None:
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


def test_prime_rl_cancels_the_youngest_when_blocks_run_out() -> None:
    policy = policy_of("prime_rl", groups_per_step=4, group_size=2)
    running = admit_all(policy, "abcd")
    assert policy.observe(
        EngineLoad(kv_usage=0.95, num_waiting=3, num_preemptions=2, seconds=5.0)
    ) == ("d",)
    assert running == ["a", "b", "c", "d"]


def test_prime_rl_admits_at_most_one_version_behind() -> None:
    policy = policy_of("prime_rl", groups_per_step=1, eta=4, group_size=1, initial_inflight=8)
    finish(policy, admit_all(policy, ["a", "b"]))
    assert policy.take(0).groups == ("a",)
    assert policy.may_admit()
    assert policy.take(1).groups == ("b",)
    assert not policy.may_admit()  # step 2 is collected, version 0 is served
    policy.published(1)
    assert policy.may_admit()


def test_prime_rl_cancels_and_sweeps() -> None:
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
