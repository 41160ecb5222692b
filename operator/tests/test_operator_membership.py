from dataclasses import replace

from pipelinerl_operator.coordinator.membership import (
    Backoff,
    Form,
    Group,
    Member,
    Observation,
    SeenGenerator,
    SeenTrainer,
    Standing,
    Wait,
    assign_ranks,
    decide,
)

NOW = 100.0


def generator(name: str, *, epoch: int = 0, workers: int = 1, since: float = 0.0) -> SeenGenerator:
    return SeenGenerator(name=name, num_workers=workers, epoch=epoch, served_version=-1, seen_since=since)


def observation(*generators: SeenGenerator, trainer_epoch: int | None = 0) -> Observation:
    trainer = None if trainer_epoch is None else SeenTrainer(trainer_epoch)
    return Observation(NOW, trainer, generators)


GROUP = Group(epoch=4, members=(Member("a", 1, 1), Member("b", 1, 2)))


def test_ranks_follow_each_other_over_workers_of_several_generators() -> None:
    group = assign_ranks(7, {"a": 2, "b": 1, "c": 4})
    assert group.members == (Member("a", 2, 1), Member("b", 1, 3), Member("c", 4, 4))
    assert group.world_size == 8


def test_first_group_is_epoch_1_of_all_ready_generators() -> None:
    decision = decide(observation(generator("a"), generator("b")), Standing(None), Backoff())
    assert isinstance(decision, Form)
    assert decision.group == Group(1, (Member("a", 1, 1), Member("b", 1, 2)))


def test_nothing_happens_without_a_trainer() -> None:
    assert isinstance(decide(observation(generator("a"), trainer_epoch=None), Standing(None), Backoff()), Wait)


def test_nothing_happens_before_the_first_generator_is_ready() -> None:
    assert decide(observation(), Standing(None), Backoff()) == Wait("no generator is ready")


def test_complete_group_is_left_alone() -> None:
    seen = observation(generator("a", epoch=4), generator("b", epoch=4), trainer_epoch=4)
    assert decide(seen, Standing(GROUP), Backoff()) == Wait("every ready generator is a member")


def test_leaver_joiner_and_restarted_member_each_form_a_new_epoch() -> None:
    a, b, c = generator("a", epoch=4), generator("b", epoch=4), generator("c")
    left = decide(observation(a, trainer_epoch=4), Standing(GROUP), Backoff())
    joined = decide(observation(a, b, c, trainer_epoch=4), Standing(GROUP), Backoff())
    restarted = decide(observation(a, replace(b, epoch=0), trainer_epoch=4), Standing(GROUP), Backoff())
    assert isinstance(left, Form)
    assert left.group == Group(5, (Member("a", 1, 1),))
    assert isinstance(joined, Form)
    assert joined.group.names == ("a", "b", "c")
    assert isinstance(restarted, Form)
    assert restarted.group.names == ("a", "b")


def test_restarted_trainer_gets_a_new_epoch_above_every_older_one() -> None:
    seen = observation(generator("a", epoch=9), generator("b", epoch=4), trainer_epoch=0)
    decision = decide(seen, Standing(GROUP), Backoff())
    assert isinstance(decision, Form)
    assert decision.group.epoch == 10


def test_last_generator_gone_leaves_the_trainer_alone_in_a_world_of_one() -> None:
    decision = decide(observation(trainer_epoch=4), Standing(GROUP), Backoff())
    assert isinstance(decision, Form)
    assert decision.group == Group(5, ())
    assert decision.group.world_size == 1
    alone = decide(observation(trainer_epoch=5), Standing(decision.group), Backoff())
    assert isinstance(alone, Wait)


def test_running_update_holds_back_a_new_group_until_its_deadline() -> None:
    seen = observation(generator("a", epoch=4), trainer_epoch=4)
    assert decide(seen, Standing(GROUP, transfer_deadline=NOW + 1), Backoff()) == Wait("an update is running")
    assert isinstance(decide(seen, Standing(GROUP, transfer_deadline=NOW - 1), Backoff()), Form)


def test_newcomer_waits_a_moment_for_others() -> None:
    young = observation(generator("a", since=NOW - 0.5), generator("b"))
    assert decide(young, Standing(None, settle_s=2), Backoff()) == Wait("generators are joining")
    assert isinstance(decide(young, Standing(None, settle_s=0.4), Backoff()), Form)


def test_failed_attempt_without_a_culprit_is_tried_again_later() -> None:
    seen = observation(generator("a"))
    assert isinstance(decide(seen, Standing(None, not_before=NOW + 1), Backoff()), Wait)
    assert isinstance(decide(seen, Standing(None, not_before=NOW), Backoff()), Form)


def test_generator_that_failed_is_left_out_until_its_backoff_ends() -> None:
    backoff = Backoff()
    assert backoff.failed("a", NOW) == 1.0
    seen = observation(generator("a"), generator("b"))
    decision = decide(seen, Standing(None), backoff)
    assert isinstance(decision, Form)
    assert decision.group.names == ("b",)
    later = decide(replace(seen, now=NOW + 1.0), Standing(None), backoff)
    assert isinstance(later, Form)
    assert later.group.names == ("a", "b")


def test_backoff_doubles_to_a_minute_and_a_success_resets_it() -> None:
    backoff = Backoff()
    assert [backoff.failed("a", NOW) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff.succeeded("a")
    assert not backoff.is_out("a", NOW)
    assert backoff.failed("a", NOW) == 1
