"""Autoscale in the life of a job."""

from typing import Any

import pytest
from operator_fake_api import Crash
from operator_fakes import JOB, FakeCluster, balance, job

from pipelinerl_operator.controller.status import JobPhase, TrainingStatus
from pipelinerl_operator.kube.resources import JOBS

ACTORS = {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}
ON = {"enabled": True, "periodSteps": 10}


async def running(**spec: Any) -> FakeCluster:
    world = FakeCluster()
    await world.submit(job(**{"actors": ACTORS, "autoscale": ON, **spec}))
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    return world


async def train(world: FakeCluster, begin: int, per_actor: float, r_train: float) -> int:
    """Ten steps with as many actors as are ready; how many there are after it."""
    world.balances[JOB] = balance(world.status.actors.ready, per_actor, r_train, begin)
    await world.settle()
    return num_actors(world)


def num_actors(world: FakeCluster) -> int:
    return sum("-actor-" in name for name in world.pods())


async def test_actors_are_added_and_taken_away_and_the_spec_stays_the_users() -> None:
    world = await running()
    trainers = {
        name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name
    }
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    assert await train(world, 10, per_actor=1.0, r_train=100.0) == 4, "the most"
    assert await train(world, 20, per_actor=1.0, r_train=2.0) == 2
    assert world.api.objects[JOBS, JOB]["spec"]["actors"]["replicas"] == 2
    assert trainers == {
        name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name
    }
    assert [note.message for note in world.notes.notes if note.reason == "Autoscaled"] == [
        "actors 2 -> 4: trainers wait for samples (ratio 1.000, above highRatio=0.95); in steps 0 "
        "to 10 2 groups per second "
        "were taken of the 2 that generation can make, without waiting it would be 100",
        "actors 4 -> 2: generators wait for the trainers (ratio 0.500, below lowRatio=0.9); in "
        "steps 20 to 30 2 groups per "
        "second were taken of the 4 that generation can make, without waiting it would be 2",
    ]
    assert world.status.autoscale is not None
    assert (world.status.autoscale.step, world.status.autoscale.ratio) == (30, 0.5)
    assert world.status.actors.desired == 2


async def test_one_period_is_looked_at_once_by_this_leader_and_the_next() -> None:
    world = await running(actors={**ACTORS, "maxReplicas": 8})
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    writes = world.num_writes()
    for _ in range(2):
        world.balances[JOB] = balance(4, 1.0, 100.0, begin=0)
        await world.settle()
        world.restart_operator()
    assert (num_actors(world), world.num_writes()) == (4, writes)


async def test_a_period_in_which_not_every_actor_was_ready_says_nothing() -> None:
    world = await running()
    world.balances[JOB] = balance(1, 1.0, 100.0)
    await world.settle()
    assert num_actors(world) == 2
    assert world.status.autoscale is None


async def test_off_has_no_effect() -> None:
    world = await running(autoscale={"enabled": False})
    writes = world.num_writes()
    await train(world, 0, per_actor=1.0, r_train=100.0)
    assert (num_actors(world), world.num_writes()) == (2, writes)


async def test_switched_off_it_gives_the_number_back_to_the_spec() -> None:
    world = await running()
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    world.change(autoscale={"enabled": False})
    await world.settle()
    assert (num_actors(world), world.status.autoscale) == (2, None)


async def test_a_user_who_scales_is_obeyed_and_the_choice_begins_from_there() -> None:
    world = await running()
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    world.change(actors={**ACTORS, "replicas": 1})
    await world.settle()
    assert num_actors(world) == 1
    assert await train(world, 10, per_actor=1.0, r_train=100.0) == 3


async def test_bounds_that_are_changed_hold_at_once() -> None:
    world = await running()
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    world.change(actors={**ACTORS, "maxReplicas": 3})
    await world.settle()
    assert num_actors(world) == 3


async def test_trainers_that_go_back_to_a_checkpoint_begin_a_period_of_their_own() -> None:
    world = await running()
    assert await train(world, 100, per_actor=1.0, r_train=100.0) == 4
    assert await train(world, 50, per_actor=1.0, r_train=2.0) == 2
    assert world.status.autoscale is not None
    assert world.status.autoscale.step == 60


async def test_a_suspended_job_comes_back_with_the_chosen_actors() -> None:
    world = await running()
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    world.change(suspend=True)
    await world.settle()
    assert num_actors(world) == 0
    world.change(suspend=False)
    await world.settle()
    assert num_actors(world) == 4


async def test_nothing_is_chosen_after_the_end() -> None:
    world = await running(cleanPodPolicy="None")
    world.end("sums-trainer-0", "trainer", 0)
    world.balances[JOB] = balance(2, 1.0, 100.0)
    await world.settle()
    assert world.is_in(JobPhase.SUCCEEDED)
    assert world.status.autoscale is None
    assert "Autoscaled" not in world.notes.reasons
    assert world.violations == []


def trained(world: FakeCluster, step: int) -> None:
    world.trainings[JOB] = TrainingStatus(step=step, policy_version=step)


HYBRID = {"enabled": True, "schedule": "hybrid", "exploreSteps": 20}


async def test_a_hybrid_job_has_every_actor_first_then_its_share_and_then_follows_the_ratio() -> (
    None
):
    """Two trainer ranks and up to four actors: 0.3 of six places are two."""
    world = await running(autoscale=HYBRID)
    assert num_actors(world) == 4
    trainers = {
        name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name
    }
    trained(world, 19)
    await world.settle()
    assert num_actors(world) == 4
    trained(world, 20)
    await world.settle()
    assert (num_actors(world), world.status.actors.desired) == (2, 2)
    assert await train(world, 20, per_actor=1.0, r_train=2.9) == 3
    trained(world, 5)
    await world.settle()
    assert num_actors(world) == 3, "exploring does not come back"
    assert trainers == {
        name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name
    }
    assert [
        note.message.partition(":")[0] for note in world.notes.notes if note.reason == "Autoscaled"
    ] == [
        "actors 4 -> 2",
        "actors 2 -> 3",
    ]


async def test_a_new_leader_finds_a_hybrid_job_where_it_was() -> None:
    world = await running(autoscale=HYBRID)
    trained(world, 20)
    await world.settle()
    writes = world.num_writes()
    world.restart_operator()
    await world.settle()
    assert (num_actors(world), world.num_writes()) == (2, writes)


async def test_a_hybrid_schedule_that_is_switched_on_late_does_not_explore() -> None:
    world = await running(autoscale={"enabled": False})
    trained(world, 500)
    await world.settle()
    made = dict(world.made)
    world.trainings.clear()
    world.restart_operator()
    world.change(autoscale=HYBRID)
    await world.settle()
    assert (num_actors(world), world.made) == (2, made)


@pytest.mark.parametrize("num_writes", range(1, 5))
async def test_a_crash_between_any_two_writes_loses_and_doubles_nothing(num_writes: int) -> None:
    world = await running()
    left = num_writes

    def crash(call: Any) -> None:
        nonlocal left
        left -= call.verb in ("status", "create", "delete")
        if left == 0:
            raise Crash

    world.api.fault = crash
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    assert left <= 0, "the crash has happened"
    assert world.violations == []
    assert world.status.actors.ready == 4
