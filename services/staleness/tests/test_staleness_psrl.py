"""PSRL's slots. Two groups per step unless said otherwise."""

from staleness_fakes import admit_all, finish, policy_of, train


def test_psrl_reserves_late_and_occupies_early() -> None:
    policy = policy_of("psrl", groups_per_step=1, eta=2)
    admit_all(policy, "abc")  # slots 2, 1, 0
    finish(policy, "a")  # c moves to slot 2, a occupies slot 0
    assert train(policy, 0).groups == ("a",)
    assert admit_all(policy, "d") == ["d"]  # slot 3
    finish(policy, "d")  # b may not live in slot 3: d keeps its own
    assert policy.take(1).groups == ()
    finish(policy, "c")
    assert train(policy, 1).groups == ("c",)


def test_psrl_fills_the_hole_of_a_failed_group() -> None:
    policy = policy_of("psrl", groups_per_step=1, eta=1)
    admit_all(policy, "ab")
    finish(policy, "ba")
    policy.lost("b")
    assert policy.take(0).groups == ("a",)
