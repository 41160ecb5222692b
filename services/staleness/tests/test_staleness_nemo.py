"""NeMo-RL's four samplers. Two groups per step unless said otherwise."""

from staleness_fakes import admit_all, finish, policy_of

from pipelinerl_staleness.policy import Take


def test_nemo_windowed_cancels_evicts_and_may_prefer_fresh() -> None:
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


def test_nemo_ready_first_overtakes_and_in_order_does_not() -> None:
    ready_first, in_order = policy_of("nemo_ready_first"), policy_of("nemo_in_order")
    for policy in (ready_first, in_order):
        admit_all(policy, "abcd")
        finish(policy, "dcb")
    assert ready_first.take(0).groups == ("b", "c")
    assert in_order.take(0).groups == ()
    finish(in_order, "a")
    assert in_order.take(0).groups == ("a", "b")


def test_in_order_promotes_when_a_group_is_lost() -> None:
    policy = policy_of("nemo_in_order")
    admit_all(policy, "abcd")
    policy.lost("a")
    finish(policy, "bc")
    assert policy.take(0).groups == ("b", "c")


def test_weight_fifo_completes_a_small_class_from_the_next() -> None:
    policy = policy_of("nemo_weight_fifo", eta=1, max_inflight_prompts=1)
    finish(policy, admit_all(policy, "a"))
    policy.published(1)
    finish(policy, admit_all(policy, "b"))
    assert policy.take(1).groups == ("a", "b")
