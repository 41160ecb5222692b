"""Autoscale: the choice alone, on systems whose rates are known; then its part in the life of a job."""

import math
from itertools import pairwise
from typing import Any

import pytest
from fake_api import Crash
from hypothesis import given
from hypothesis import strategies as st
from operator_jobs import make_resource
from world import JOB, World, job

from pipelinerl_common.settings import JobSpec
from pipelinerl_operator.controller.autoscale import choose
from pipelinerl_operator.controller.balance import Balance
from pipelinerl_operator.controller.status import Phase
from pipelinerl_operator.kube.resources import JOBS


def spec_of(least: int, most: int, start: int, gpus: int = 0, **settings: Any) -> JobSpec:
    actors = {"minReplicas": least, "maxReplicas": most, "replicas": start, "gpusPerReplica": gpus}
    return make_resource(actors=actors, autoscale={"enabled": True, **settings}).spec


def system(num_actors: int, per_actor: float, r_train: float, begin: int = 0, steps: int = 10) -> Balance:
    """Of a job whose actors make `per_actor` groups/s each and whose trainers take up to `r_train`."""
    r_gen = num_actors * per_actor
    return Balance(begin, begin + steps, num_actors, min(r_gen, r_train), r_gen, r_train)


def test_nothing_is_chosen_before_the_period_is_over() -> None:
    assert choose(spec_of(1, 8, 2), 2, system(2, 1.0, 9.0, steps=9)) is None


def test_the_rule_adds_two_and_takes_five_and_changes_nothing_in_the_band() -> None:
    spec = spec_of(1, 40, 20)
    assert choose(spec, 20, system(20, 1.0, 100.0)) == 22
    assert choose(spec, 20, system(20, 1.0, 5.0)) == 15
    assert choose(spec, 20, system(20, 1.0, 18.6)) == 20


def test_gpus_are_rounded_up_to_whole_actors() -> None:
    """8 GPUs each: 2 GPUs more are one actor, 5 less are one."""
    spec = spec_of(1, 40, 20, gpus=8)
    assert choose(spec, 20, system(20, 1.0, 100.0)) == 21
    assert choose(spec, 20, system(20, 1.0, 5.0)) == 19


def test_a_stride_ends_at_the_balance() -> None:
    """Trainers for 3 actors. Of 5, two go and not four; of 3, none is added: 4 would make 3/4, which is below 0.9."""
    spec = spec_of(1, 8, 5)
    assert choose(spec, 5, system(5, 1.0, 3.0)) == 3
    assert choose(spec, 3, system(3, 1.0, 3.0)) == 3


def test_while_both_sides_wait_nothing_is_taken_away() -> None:
    """Generation could make 10 groups/s and the trainers take 4, but the staleness policy lets them have 2."""
    assert choose(spec_of(1, 8, 4), 4, Balance(0, 10, 4, 2.0, 10.0, 4.0)) == 4


def test_a_job_that_generates_nothing_is_left_alone() -> None:
    assert choose(spec_of(1, 8, 2), 2, Balance(0, 10, 2, 0.0, 0.0, 0.0)) == 2


@given(
    bounds=st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    gpus=st.sampled_from([0, 1, 8]),
    rates=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted),
    idle=st.booleans(),
)
def test_every_choice_is_within_the_bounds(bounds: list[int], gpus: int, rates: list[float], idle: bool) -> None:
    least, before, most = bounds
    balance = Balance(0, 10, before, rates[0], rates[1], math.inf if idle else max(rates[0], rates[2]))
    chosen = choose(spec_of(least, most, before, gpus), before, balance)
    assert chosen is not None
    assert least <= chosen <= most


@given(
    bounds=st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    gpus=st.sampled_from([0, 1, 8]),
    per_actor=st.floats(0.1, 10),
    r_train=st.floats(0.05, 600),
    strides=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    band=st.tuples(st.floats(0.3, 0.99), st.floats(0.3, 1.0)).filter(lambda band: band[0] < band[1]),
)
def test_a_system_of_constant_rates_comes_to_rest_and_never_goes_down_after_it_went_up(
    bounds: list[int],
    gpus: int,
    per_actor: float,
    r_train: float,
    strides: tuple[int, int],
    band: tuple[float, float],
) -> None:
    least, count, most = bounds
    settings = {"takeAwayGpus": strides[0], "addGpus": strides[1], "lowRatio": band[0], "highRatio": band[1]}
    spec = spec_of(least, most, count, gpus, **settings)
    counts = [count]
    for _ in range(64):
        chosen = choose(spec, counts[-1], system(counts[-1], per_actor, r_train))
        assert chosen is not None
        counts.append(chosen)
    assert counts[-1] == counts[-2], "at most 59 actors to go"
    changes = [b - a for a, b in pairwise(counts) if a != b]
    rises = [change > 0 for change in changes]
    assert rises == sorted(rises), "down to the balance first, then up to it, and never again down"


# in the life of a job


ACTORS = {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}
ON = {"enabled": True, "periodSteps": 10}


async def running(**spec: Any) -> World:
    world = World()
    await world.submit(job(**{"actors": ACTORS, "autoscale": ON, **spec}))
    await world.settle()
    assert world.is_in(Phase.RUNNING)
    return world


async def train(world: World, begin: int, per_actor: float, r_train: float) -> int:
    """Ten steps with as many actors as are ready; how many there are after it."""
    world.balances[JOB] = system(world.status.actors.ready, per_actor, r_train, begin)
    await world.settle()
    return num_actors(world)


def num_actors(world: World) -> int:
    return sum("-actor-" in name for name in world.pods())


async def test_actors_are_added_and_taken_away_and_the_spec_stays_the_users() -> None:
    world = await running()
    trainers = {name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name}
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    assert await train(world, 10, per_actor=1.0, r_train=100.0) == 4, "the most"
    assert await train(world, 20, per_actor=1.0, r_train=2.0) == 2
    assert world.api.objects[JOBS, JOB]["spec"]["actors"]["replicas"] == 2
    assert trainers == {name: body["metadata"]["uid"] for name, body in world.pods().items() if "actor" not in name}
    assert [note.message for note in world.notes.notes if note.reason == "Autoscaled"] == [
        "actors 2 -> 4: in steps 0 to 10 the trainers took 2 of the 2 groups per second that generation can make, a ratio of "
        "1.000, above highRatio=0.95; without waiting they would take 100",
        "actors 4 -> 2: in steps 20 to 30 the trainers took 2 of the 4 groups per second that generation can make, a ratio of "
        "0.500, below lowRatio=0.9; without waiting they would take 2",
    ]
    assert world.status.autoscale is not None
    assert (world.status.autoscale.step, world.status.autoscale.ratio) == (30, 0.5)
    assert world.status.actors.desired == 2


async def test_one_period_is_looked_at_once_by_this_leader_and_the_next() -> None:
    world = await running(actors={**ACTORS, "maxReplicas": 8})
    assert await train(world, 0, per_actor=1.0, r_train=100.0) == 4
    writes = world.num_writes()
    for _ in range(2):
        world.balances[JOB] = system(4, 1.0, 100.0, begin=0)
        await world.settle()
        world.restart_operator()
    assert (num_actors(world), world.num_writes()) == (4, writes)


async def test_a_period_in_which_not_every_actor_was_ready_says_nothing() -> None:
    world = await running()
    world.balances[JOB] = system(1, 1.0, 100.0)
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
    world.balances[JOB] = system(2, 1.0, 100.0)
    await world.settle()
    assert world.is_in(Phase.SUCCEEDED)
    assert world.status.autoscale is None
    assert "Autoscaled" not in world.notes.reasons
    assert world.violations == []


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
