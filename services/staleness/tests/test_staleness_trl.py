"""TRL's cap on running work and its filter at the head of the queue.

There are two groups per step unless the test says otherwise.
"""

from staleness_fakes import admit_all, finish, policy_of, train


def test_trl_counts_running_work_only() -> None:
    policy = policy_of("trl", eta=1, queue_groups=5)
    for batch in ("ab", "cd", "e"):
        finish(policy, admit_all(policy, batch))
    assert not policy.may_admit()  # five finished groups fill the queue
    assert policy.take(0).groups == ("a", "b")
    assert policy.may_admit()


def test_trl_frees_slots_trajectory_by_trajectory() -> None:
    policy = policy_of("trl", eta=1, slots="trajectory", group_size=2)
    assert policy.trajectory_limit() == 4
    assert admit_all(policy, "abcd") == ["a", "b"]
    policy.trajectory_finished("a")
    assert admit_all(policy, "cd") == ["c"]
    policy.lost("b")
    assert admit_all(policy, "de") == ["d"]


def test_trl_drops_at_the_head_of_the_queue_only() -> None:
    policy = policy_of("trl", eta=1)
    finish(policy, admit_all(policy, "ab"))
    finish(policy, admit_all(policy, "cd"))
    train(policy, 0)
    policy.published(2)  # as if step 1 had trained something else
    finish(policy, admit_all(policy, "ef"))
    taken = policy.take(2)
    assert (taken.groups, taken.dropped) == (("e", "f"), ("c", "d"))


def test_trl_prefetch_checks_one_version_early() -> None:
    policy = policy_of("trl", eta=0, prefetch=True)
    finish(policy, admit_all(policy, "ab"))
    policy.published(1)
    assert policy.take(1).groups == ("a", "b")
    assert policy.bound() == 1
