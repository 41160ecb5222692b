"""A job with an evaluator: what its pod is, and that the job waits for the last evaluation but
never fails by one.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_fakes import FakeCluster, job, make_context, make_resource
from test_operator_convergence import FAULTS, STEPS, is_running, nth_write, take

from pipelinerl_control.plan import num_gpus
from pipelinerl_operator.controller.restarts import FailureReason, PodFailure, judge
from pipelinerl_operator.controller.status import JobPhase, read_time, write_time
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.kube.resources import PODS
from pipelinerl_operator.objects import desired_objects

SETS = [{"name": "held-out", "path": "tasks:Sums"}]
EVALUATION: dict[str, Any] = {"everySteps": 100, "sets": SETS, "timeoutSeconds": 20}
LIMIT_S = 2 * 20 + 60
TRAINERS = {"sums-trainer-0", "sums-trainer-1"}


async def running(**spec: Any) -> FakeCluster:
    world = FakeCluster()
    await world.submit(job(evaluation=EVALUATION, **spec))
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    return world


async def trained(**spec: Any) -> FakeCluster:
    world = await running(**spec)
    for name in TRAINERS:
        world.end(name, "trainer", 0)
    await world.settle()
    return world


# The pod


def evaluator(**spec: Any) -> dict[str, Any]:
    claim = {"trainers": {"checkpoint": {"pvc": "checkpoints"}}}
    wanted = desired_objects(
        make_resource(evaluation=EVALUATION, **{**claim, **spec}), make_context()
    )
    (pod,) = (each for each in wanted.pods if each.role == "evaluator")
    return pod.manifest(0)


def flag(container: dict[str, Any], name: str) -> str:
    return str(container["args"][container["args"].index(name) + 1])


def test_its_pod_reads_the_trainers_claim_and_its_generator_serves_nobody_else() -> None:
    manifest = evaluator()
    (container,) = manifest["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pipelinerl_actor.evaluation"]
    assert flag(container, "--output") == "/checkpoints/sums"
    assert flag(container, "--listen") == "127.0.0.1:8000"
    assert flag(container, "--last-result") == "/dev/termination-log"
    assert [port["containerPort"] for port in container["ports"]] == [9090]
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in container["volumeMounts"]
    (prepare,) = manifest["spec"]["initContainers"]
    assert "--check-sets" in prepare["args"]
    assert "--check-task" not in prepare["args"]
    assert manifest["metadata"]["labels"]["pipelinerl.dev/role"] == "evaluator"


def test_a_shared_folder_stands_for_the_claim() -> None:
    (container,) = evaluator(trainers={"checkpoint": {"uri": "file:///mnt/shared"}})["spec"][
        "containers"
    ]
    assert flag(container, "--output") == "/mnt/shared"


@pytest.mark.parametrize(
    ("actors", "evaluation", "gpus"),
    [
        ({}, {}, 0),
        ({"gpusPerReplica": 4, "generator": {"tensorParallelSize": 4}}, {}, 4),
        ({"gpusPerReplica": 1}, {"generator": {"tensorParallelSize": 2}}, 2),
        ({"gpusPerReplica": 1}, {"gpusPerReplica": 0}, 0),
    ],
)
def test_it_has_as_many_gpus_as_its_generator_takes(
    actors: dict[str, Any], evaluation: dict[str, Any], gpus: int
) -> None:
    claim = {"checkpoint": {"pvc": "checkpoints"}}
    resource = make_resource(actors=actors, evaluation={**EVALUATION, **evaluation}, trainers=claim)
    assert num_gpus(resource.job, "evaluator-0") == gpus


# While training continues


async def test_it_is_started_again_alone_and_never_costs_a_restart_of_the_budget() -> None:
    world = await running(
        failurePolicy={"maxRestarts": 0, "backoff": {"initialSeconds": 1, "maxSeconds": 2}}
    )
    for _ in range(3):
        world.end("sums-evaluator-0", "evaluator", 1, message="no memory")
        await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert world.attempts()["sums-evaluator-0"] == 3
    assert set(world.attempts().values()) == {0, 3}
    assert world.status.evaluator is not None
    assert (world.status.evaluator.restarts, world.status.evaluator.ready) == (3, 1)
    assert world.notes.reasons.count("PodFailed") == 3


def test_only_rules_that_name_it_are_for_it() -> None:
    policy = job()["spec"]["failurePolicy"]
    wrong = PodFailure("sums-evaluator-0", "evaluator", "node", FailureReason.ERROR, 2)
    for rules, fails in (
        ([], False),
        ([{"action": "FailJob", "exitCodes": [2]}], False),
        ([{"action": "FailJob", "role": "evaluator"}], True),
    ):
        spec = make_resource(failurePolicy={**policy, "rules": rules}).spec
        verdict = judge(wrong, spec.failure_policy)
        assert (verdict.fails, verdict.counted) == (fails, False)


async def test_the_job_runs_without_it() -> None:
    """Its pod may wait for a node for as long as it takes."""
    world = FakeCluster()
    await world.submit(job(evaluation=EVALUATION))
    for _ in range(6):
        world.sync()
        await world.look()
        for name in set(world.pods()) - {"sums-evaluator-0"}:
            world.start(name)
        world.now += 3
    assert world.status.holds("Running")
    assert world.pods()["sums-evaluator-0"]["status"]["phase"] == "Pending"


# After training


async def test_the_last_evaluation_is_waited_for_and_only_its_pod_runs_on() -> None:
    world = await trained()
    assert world.is_in(JobPhase.EVALUATING)
    assert {name for name, pod in world.pods().items() if pod["status"]["phase"] == "Running"} == {
        "sums-evaluator-0"
    }
    condition = world.status.condition("Evaluating")
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "TrainingFinished")
    assert (
        condition.message == "the last step is evaluated until "
        f"{write_time(read_time(condition.last_transition_time) + LIMIT_S)}"
    )
    world.end("sums-evaluator-0", "evaluator", 0, message="step 60: held-out pass@1 0.812")
    await world.settle()
    assert world.is_in(JobPhase.SUCCEEDED)
    assert [(note.reason, note.message) for note in world.notes.notes][-3:] == [
        ("Evaluating", "training is finished; the last step is evaluated"),
        ("Evaluated", "step 60: held-out pass@1 0.812"),
        ("Succeeded", "training is finished"),
    ]
    assert not world.status.holds("Evaluating")


async def test_an_evaluator_that_was_faster_is_not_waited_for() -> None:
    world = await running()
    world.end("sums-evaluator-0", "evaluator", 0)
    world.now += 300
    await world.settle()
    assert world.is_in(JobPhase.RUNNING), "that it is done is no failure"
    assert world.attempts()["sums-evaluator-0"] == 0
    world.end("sums-trainer-0", "trainer", 0)
    await world.settle()
    assert world.is_in(JobPhase.SUCCEEDED)
    assert "Evaluating" not in world.notes.reasons


async def test_an_evaluation_that_does_not_end_ends_the_wait() -> None:
    world = await trained()
    world.now += LIMIT_S
    await world.settle()
    assert world.is_in(JobPhase.SUCCEEDED)
    assert "NotEvaluated" in world.notes.reasons
    assert set(world.pods()) == TRAINERS


async def test_an_evaluator_that_keeps_failing_after_training_fails_nothing() -> None:
    world = await trained()
    for _ in range(40):
        if world.status.is_finished:
            break
        if is_running(world, "sums-evaluator-0"):
            world.end("sums-evaluator-0", "evaluator", 2)
        world.sync()
        await world.look()
        world.run_pods()
        world.now += 4
    assert world.is_in(JobPhase.SUCCEEDED)
    assert world.notes.reasons.count("PodFailed") > 1


async def test_a_trainer_pod_that_is_collected_meanwhile_trains_to_its_end_again() -> None:
    world = await trained()
    world.api.remove(PODS, ObjectKey("default", "sums-trainer-0"), 0)
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert not world.status.holds("Evaluating")
    for name in TRAINERS:
        world.end(name, "trainer", 0)
    await world.settle()
    assert world.is_in(JobPhase.EVALUATING)
    assert world.violations == []


async def test_a_suspension_interrupts_the_wait_which_begins_anew() -> None:
    world = await trained()
    world.change(suspend=True)
    await world.settle()
    assert world.is_in(JobPhase.SUSPENDED)
    assert world.pods() == {}
    world.now += 10 * LIMIT_S
    world.change(suspend=False)
    await world.settle()
    for name in TRAINERS:
        world.end(name, "trainer", 0)
    await world.settle()
    assert world.is_in(JobPhase.EVALUATING)


EVALUATOR_STEPS = st.one_of(
    STEPS,
    st.tuples(
        st.just("evaluator"), st.sampled_from(["error", "memory", "evicted", "vanished", "done"])
    ),
)


async def live(steps: list[tuple[object, ...]]) -> None:
    world = FakeCluster()
    policy = {
        "maxRestarts": 1000,
        "backoff": {"initialSeconds": 1, "maxSeconds": 4},
        "terminatingPodTimeoutSeconds": 30,
    }
    await world.submit(job(failurePolicy=policy, evaluation=EVALUATION))
    for step in steps:
        match step:
            case ("evaluator", "done") if "sums-evaluator-0" in world.pods():
                world.end("sums-evaluator-0", "evaluator", 0)
            case ("evaluator", str(kind)):
                end_evaluator(world, kind)
            case _:
                await take(world, step)
        assert world.violations == []
    world.change(actors={"replicas": 2, "minReplicas": 1}, suspend=False)
    world.now += 120
    await world.settle(rounds=300)
    if world.is_in(JobPhase.EVALUATING):
        world.now += LIMIT_S
        await world.settle(rounds=300)
    assert world.status.phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED)
    if world.is_in(JobPhase.RUNNING):
        assert "sums-evaluator-0" in world.pods()
    assert world.violations == []
    before = world.num_writes()
    world.restart_operator()
    await world.settle(rounds=30)
    assert world.num_writes() == before, "a quiet resync of a new leader writes nothing"


def end_evaluator(world: FakeCluster, kind: str) -> None:
    if not is_running(world, "sums-evaluator-0"):
        return
    if kind == "vanished":
        world.api.remove(PODS, ObjectKey("default", "sums-evaluator-0"), 0)
    else:
        reasons = {"memory": {"reason": "OOMKilled"}, "evicted": {"pod_reason": "Evicted"}}
        world.end("sums-evaluator-0", "evaluator", 1, **reasons.get(kind, {}))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVALUATOR_STEPS, min_size=5, max_size=40))
def test_a_job_with_an_evaluator_converges_through_everything(
    steps: list[tuple[object, ...]],
) -> None:
    asyncio.run(live(steps))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FAULTS)), st.integers(0, 8))
def test_one_fault_at_any_write_after_training_changes_nothing_in_the_end(
    fault: str, n: int
) -> None:
    async def one() -> None:
        world = await running()
        world.api.fault = nth_write(FAULTS[fault], n)
        for name in TRAINERS:
            world.end(name, "trainer", 0)
        await world.settle(rounds=200)
        world.api.fault = lambda call: None
        if is_running(world, "sums-evaluator-0"):
            world.end("sums-evaluator-0", "evaluator", 0)
        await world.settle(rounds=200)
        assert world.is_in(JobPhase.SUCCEEDED)
        assert world.violations == []

    asyncio.run(one())
