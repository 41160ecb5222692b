"""The layers of the article's ablation, each on or off.

There are two groups per step unless the test says otherwise.
"""

from staleness_fakes import admit_all, finish, policy_of, train


def test_layered_filter_and_cancel_are_independent() -> None:
    outcomes = {}
    for layer2 in (False, True):
        for layer3 in (False, True):
            policy = policy_of("layered", eta=1, layer2=layer2, layer3=layer3)
            admit_all(policy, "abcd")
            finish(policy, "abc")
            train(policy, 0)
            admit_all(policy, "ef")
            cancelled = policy.published(2)
            finish(policy, [*admit_all(policy, "gh"), "e", "f"])
            outcomes[layer2, layer3] = (cancelled, policy.take(2).dropped)
    assert outcomes == {
        (False, False): ((), ()),
        (False, True): ((), ("c",)),
        (True, False): (("d",), ()),
        (True, True): (("d",), ("c",)),
    }
