from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from pipelinerl_control.membership import (
    Form,
    Member,
    MemberBackoff,
    Observation,
    SeenGenerator,
    SeenTrainer,
    Standing,
    Wait,
    WeightGroup,
    assign_ranks,
    decide,
)

NOW = 100.0


def generator(name: str, *, epoch: int = 0, workers: int = 1, since: float = 0.0) -> SeenGenerator:
    return SeenGenerator(
        name=name, num_workers=workers, epoch=epoch, served_version=-1, seen_since=since
    )


def observation(*generators: SeenGenerator, trainer_epoch: int | None = 0) -> Observation:
    trainer = None if trainer_epoch is None else SeenTrainer(trainer_epoch)
    return Observation(NOW, trainer, generators)


GROUP = WeightGroup(epoch=4, members=(Member("a", 1, 1), Member("b", 1, 2)))


def test_ranks_follow_each_other_over_workers_of_several_generators() -> None:
    group = assign_ranks(7, {"a": 2, "b": 1, "c": 4})
    assert group.members == (Member("a", 2, 1), Member("b", 1, 3), Member("c", 4, 4))
    assert group.world_size == 8


def test_first_group_is_epoch_1_of_all_ready_generators() -> None:
    decision = decide(observation(generator("a"), generator("b")), Standing(None), MemberBackoff())
    assert isinstance(decision, Form)
    assert decision.group == WeightGroup(1, (Member("a", 1, 1), Member("b", 1, 2)))


def test_nothing_happens_without_a_trainer() -> None:
    assert isinstance(
        decide(observation(generator("a"), trainer_epoch=None), Standing(None), MemberBackoff()),
        Wait,
    )


def test_nothing_happens_before_the_first_generator_is_ready() -> None:
    assert decide(observation(), Standing(None), MemberBackoff()) == Wait("no generator is ready")


def test_complete_group_is_left_alone() -> None:
    seen = observation(generator("a", epoch=4), generator("b", epoch=4), trainer_epoch=4)
    assert decide(seen, Standing(GROUP), MemberBackoff()) == Wait(
        "every ready generator is a member"
    )


def test_leaver_joiner_and_restarted_member_each_form_a_new_epoch() -> None:
    a, b, c = generator("a", epoch=4), generator("b", epoch=4), generator("c")
    left = decide(observation(a, trainer_epoch=4), Standing(GROUP), MemberBackoff())
    joined = decide(observation(a, b, c, trainer_epoch=4), Standing(GROUP), MemberBackoff())
    restarted = decide(
        observation(a, replace(b, epoch=0), trainer_epoch=4), Standing(GROUP), MemberBackoff()
    )
    assert isinstance(left, Form)
    assert left.group == WeightGroup(5, (Member("a", 1, 1),))
    assert isinstance(joined, Form)
    assert joined.group.names == ("a", "b", "c")
    assert isinstance(restarted, Form)
    assert restarted.group.names == ("a", "b")


def test_restarted_trainer_gets_a_new_epoch_above_every_older_one() -> None:
    seen = observation(generator("a", epoch=9), generator("b", epoch=4), trainer_epoch=0)
    decision = decide(seen, Standing(GROUP), MemberBackoff())
    assert isinstance(decision, Form)
    assert decision.group.epoch == 10


def test_last_generator_gone_leaves_the_trainer_alone_in_a_world_of_one() -> None:
    decision = decide(observation(trainer_epoch=4), Standing(GROUP), MemberBackoff())
    assert isinstance(decision, Form)
    assert decision.group == WeightGroup(5, ())
    assert decision.group.world_size == 1
    alone = decide(observation(trainer_epoch=5), Standing(decision.group), MemberBackoff())
    assert isinstance(alone, Wait)


def test_running_update_holds_back_a_new_group_until_its_deadline() -> None:
    seen = observation(generator("a", epoch=4), trainer_epoch=4)
    assert decide(seen, Standing(GROUP, transfer_deadline=NOW + 1), MemberBackoff()) == Wait(
        "an update is running"
    )
    assert isinstance(
        decide(seen, Standing(GROUP, transfer_deadline=NOW - 1), MemberBackoff()), Form
    )


def test_a_lone_newcomer_joins_at_once() -> None:
    first = decide(observation(generator("a", since=NOW)), Standing(None), MemberBackoff())
    assert isinstance(first, Form)
    assert first.group.names == ("a",)
    members = generator("a", epoch=4), generator("b", epoch=4)
    third = decide(
        observation(*members, generator("c", since=NOW), trainer_epoch=4),
        Standing(GROUP),
        MemberBackoff(),
    )
    assert isinstance(third, Form)
    assert third.group.names == ("a", "b", "c")


def test_newcomers_wait_for_one_that_is_starting_but_never_longer_than_the_settling_time() -> None:
    seen = replace(
        observation(generator("a", since=NOW), generator("b", since=NOW)), num_starting=1
    )
    for later, both in ((0.0, Wait), (1.9, Wait), (2.0, Form)):
        assert isinstance(
            decide(replace(seen, now=NOW + later), Standing(None, settle_s=2), MemberBackoff()),
            both,
        )
    staggered = replace(
        seen, now=NOW + 2.0, generators=(generator("a", since=NOW), generator("b", since=NOW + 1.9))
    )
    assert isinstance(
        decide(staggered, Standing(None, settle_s=2), MemberBackoff()), Form
    )  # the next one does not make the others wait longer


def test_one_that_is_starting_keeps_no_other_change_waiting() -> None:
    seen = replace(observation(generator("a", epoch=4), trainer_epoch=4), num_starting=1)
    assert isinstance(decide(seen, Standing(GROUP), MemberBackoff()), Form)  # b has left


@example([True, False] * 30)
@example([False, True, True, True] * 15)
@given(st.lists(st.booleans(), min_size=60, max_size=60))
def test_one_that_comes_and_goes_forms_a_group_only_when_it_has_stayed(answers: list[bool]) -> None:
    """One round a second, for a minute: b answers or does not. It joins after two seconds, and so
    may leave once in three.
    """
    group, epochs, since = WeightGroup(1, (Member("a", 1, 1),)), 0, 0.0
    for now, is_there in enumerate(answers):
        if not is_there:
            since = now + 1.0
        b = SeenGenerator(
            "b",
            1,
            group.epoch if "b" in group.names else 0,
            -1,
            seen_since=since,
            has_returned=True,
        )
        generators = (generator("a", epoch=group.epoch), *([b] if is_there else []))
        seen = Observation(
            float(now), SeenTrainer(group.epoch), generators, num_starting=0 if is_there else 1
        )
        decision = decide(seen, Standing(group), MemberBackoff())
        if isinstance(decision, Form):
            group, epochs = decision.group, epochs + 1
    assert epochs <= 2 * (len(answers) // 4 + 1)  # away, back, one more second, joined


def test_failed_attempt_without_a_culprit_is_tried_again_later() -> None:
    seen = observation(generator("a"))
    assert isinstance(decide(seen, Standing(None, not_before=NOW + 1), MemberBackoff()), Wait)
    assert isinstance(decide(seen, Standing(None, not_before=NOW), MemberBackoff()), Form)


def test_generator_that_failed_is_left_out_until_its_backoff_ends() -> None:
    backoff = MemberBackoff()
    assert backoff.failed("a", NOW) == 1.0
    seen = observation(generator("a"), generator("b"))
    decision = decide(seen, Standing(None), backoff)
    assert isinstance(decision, Form)
    assert decision.group.names == ("b",)
    later = decide(replace(seen, now=NOW + 1.0), Standing(None), backoff)
    assert isinstance(later, Form)
    assert later.group.names == ("a", "b")


def test_backoff_doubles_to_a_minute_and_a_success_resets_it() -> None:
    backoff = MemberBackoff()
    assert [backoff.failed("a", NOW) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff.succeeded("a")
    assert not backoff.is_out("a", NOW)
    assert backoff.failed("a", NOW) == 1
