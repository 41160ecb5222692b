"""OpenRLHF's batches and permits, and the article's model of it.

There are two groups per step unless the test says otherwise.
"""

import random

from staleness_fakes import admit_all, finish, policy_of, train


def test_openrlhf_generates_one_batch_at_a_time_and_holds_the_publish() -> None:
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


def test_openrlhf_partial_rollout_publishes_at_once() -> None:
    policy = policy_of("openrlhf", partial_rollout=True)
    admit_all(policy, "ab")
    assert policy.may_publish()


def test_openrlhf_replaces_a_failed_group_inside_its_batch() -> None:
    policy = policy_of("openrlhf")
    admit_all(policy, "ab")
    finish(policy, "a")
    policy.lost("b")
    assert policy.take(0).groups == ()
    finish(policy, admit_all(policy, "cd"))
    assert policy.take(0).groups == ("a", "c")


def test_openrlhf_article_decides_as_areal() -> None:
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
