"""verl's two strategies against old groups. Two groups per step unless said otherwise."""

import pytest
from staleness_fakes import admit_all, finish, policy_of, train


def test_verl_drop_evicts_finished_groups_and_refills_one_for_one() -> None:
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


def test_verl_wait_waits_for_running_groups_at_the_threshold() -> None:
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
def test_verl_counts_the_newest_start_of_a_group_granted_again(name: str) -> None:
    policy = policy_of(name, eta=3, num_warmup_batches=1)
    admit_all(policy, "abcd")
    policy.published(1)
    policy.started("a", 1)
    finish(policy, "acbd")
    assert policy.take(1).groups == ("b", "c")


@pytest.mark.parametrize("warmup", [1, 2, 3])
@pytest.mark.parametrize("eta", [1, 2, 3, 4])
def test_verl_wait_bound_is_attained(warmup: int, eta: int) -> None:
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
