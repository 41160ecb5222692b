"""slime's two gates. Two groups per step unless said otherwise."""

from staleness_fakes import admit_all, finish, policy_of


def test_slime_gates_on_running_and_on_waiting_groups() -> None:
    policy = policy_of("slime", prefetch_factor=1)
    finish(policy, admit_all(policy, "ab"))
    assert not policy.may_admit()
    policy.take(0)
    assert admit_all(policy, "cde") == ["c", "d"]
    assert not policy.may_publish()  # the next batch is not complete
    finish(policy, "cd")
    assert policy.may_publish()
