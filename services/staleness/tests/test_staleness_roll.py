"""ROLL's cancelling, filter and start steps. Two groups per step unless said otherwise."""

from staleness_fakes import admit_all, finish, policy_of, train

from pipelinerl_staleness.policy import Take


def test_roll_cancels_at_the_publish_and_takes_oldest_start_first() -> None:
    policy = policy_of("roll", rho=1)
    admit_all(policy, "abcd")
    finish(policy, "ab")
    train(policy, 0)
    finish(policy, admit_all(policy, "ef"))
    finish(policy, "d")
    assert train(policy, 1, publish=False).groups == ("d", "e")
    assert policy.published(2) == ("c",)


def test_roll_drops_what_finished_too_late() -> None:
    policy = policy_of("roll", rho=1)
    admit_all(policy, "abcd")
    finish(policy, "abc")
    train(policy, 0)
    finish(policy, admit_all(policy, "ef"))
    policy.published(2)
    finish(policy, admit_all(policy, "gh"))
    assert policy.take(2) == Take(groups=("e", "f"), dropped=("c",))


def test_roll_rlvr_blocks_on_the_older_start_step_and_equals_weight_fifo() -> None:
    for policy in (policy_of("roll_rlvr", rho=1), policy_of("nemo_weight_fifo", eta=1)):
        admit_all(policy, "abcd")
        finish(policy, "ab")
        train(policy, 0)
        finish(policy, [*admit_all(policy, "ef"), "d"])
        assert policy.take(1).groups == ()
        finish(policy, "c")
        assert policy.take(1).groups == ("c", "d")
