"""AReaL and SkyRL: one capacity, two orders of taking.

There are two groups per step unless the test says otherwise.
"""

from staleness_fakes import admit_all, finish, policy_of, train


def test_areal_takes_earliest_started_and_skyrl_earliest_finished() -> None:
    areal, skyrl = policy_of("areal", eta=1), policy_of("skyrl", max_staleness_steps=1)
    for policy in (areal, skyrl):
        admit_all(policy, "abcd")
        finish(policy, "dcb")
    assert areal.take(0).groups == ("b", "c")
    assert skyrl.take(0).groups == ("d", "c")


def test_skyrl_counts_violations_and_trains_them() -> None:
    policy = policy_of("skyrl", max_staleness_steps=1)
    admit_all(policy, "abcd")
    finish(policy, "ab")
    train(policy, 0)
    finish(policy, admit_all(policy, "ef"))
    train(policy, 1)
    finish(policy, [*"cd", *admit_all(policy, "gh")])
    assert train(policy, 2).groups == ("c", "d")
    assert policy.num_violations == 2  # type: ignore[attr-defined]
