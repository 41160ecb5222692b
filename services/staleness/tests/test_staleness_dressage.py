"""Dressage's window of end versions. Two groups per step unless said otherwise."""

from staleness_fakes import admit_all, finish, policy_of

from pipelinerl_staleness.policy import Take


def test_dressage_group_scope_looks_at_the_last_end_version() -> None:
    policy = policy_of("dressage", keep_versions=1, max_active=4)
    admit_all(policy, "abcd")
    for group, ends in (("a", [0, 0]), ("b", [0, 1]), ("c", [1])):
        for version in ends:
            policy.last_token(group, version)
        policy.finished(group)
    assert policy.take(1) == Take(groups=("b", "c"), dropped=("a",))


def test_dressage_trajectory_scope_drops_for_any_early_end() -> None:
    policy = policy_of("dressage", keep_versions=1, max_active=4, scope="trajectory")
    admit_all(policy, "abcd")
    for group, ends in (("b", [0, 1]), ("c", [1]), ("d", [1])):
        for version in ends:
            policy.last_token(group, version)
        policy.finished(group)
    assert policy.take(1) == Take(groups=("c", "d"), dropped=("b",))


def test_dressage_orders_versions_by_first_sight() -> None:
    policy = policy_of("dressage", keep_versions=1, max_active=4)
    admit_all(policy, "abcd")
    for group, end in (
        ("a", 5),
        ("b", 3),
        ("c", 3),
    ):  # 3 is seen after 5 and counts as the newer one
        finish(policy, group, end)
    assert policy.take(5) == Take(groups=("b", "c"), dropped=("a",))


def test_dressage_keeps_unlabelled_groups() -> None:
    policy = policy_of("dressage", keep_versions=1, max_active=4)
    admit_all(policy, "abc")
    policy.finished("a")
    finish(policy, "bc", -1)
    assert policy.take(0).groups == ("a", "b")


def test_dressage_limits_version_switches() -> None:
    policy = policy_of("dressage", max_version_switches=1)
    admit_all(policy, "ab")
    policy.first_token("a", 0)
    assert policy.published(1) == ()
    policy.first_token("b", 1)
    assert policy.published(2) == ("a",)
