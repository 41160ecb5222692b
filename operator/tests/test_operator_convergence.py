"""Whatever happens, in whatever order, with whatever faults of the API server: a job ends up as its
spec and its pods say, no promise is broken on the way, and then nothing is written any more.
"""

import asyncio
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_fake_api import Call, Crash, Fault
from operator_fakes import JOB, FakeCluster, job

from pipelinerl_operator.controller.status import JobPhase
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.kube.errors import ApiUnavailable, Conflict, Forbidden, TooManyRequests
from pipelinerl_operator.kube.resources import CONFIG_MAPS, JOBS, PODS

NAMES = ("sums-actor-0", "sums-actor-1", "sums-preprocessor-0", "sums-trainer-0", "sums-trainer-1")
CONTAINERS = {"actor": "rollout", "preprocessor": "preprocessor", "trainer": "trainer"}
FAULTS: dict[str, Fault] = {
    "conflict": Fault(Conflict("409")),
    "throttled": Fault(TooManyRequests("429", 2.0)),
    "broken": Fault(ApiUnavailable("500")),
    "forbidden": Fault(Forbidden("403: exceeded quota")),
    "answer lost": Fault(ApiUnavailable("cut off"), answer_lost=True),
    "crash before": Fault(Crash()),
    "crash after": Fault(Crash(), answer_lost=True),
}
STEPS = st.one_of(
    st.tuples(st.just("look"), st.sampled_from([None, *FAULTS]), st.integers(0, 6)),
    st.tuples(st.just("sync"), st.sampled_from(["jobs", "pods", "children", "all"])),
    st.tuples(
        st.just("fail"),
        st.sampled_from(NAMES),
        st.sampled_from(["error", "memory", "evicted", "container", "vanished"]),
    ),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(
        st.just("edit"),
        st.sampled_from(
            ["suspend", "resume", "one", "two", "three", "restart", "invalid", "valid"]
        ),
    ),
    st.tuples(st.just("wait"), st.sampled_from([1, 3, 20, 400])),
    st.tuples(st.just("kubelet")),
    st.tuples(st.just("failover")),
    st.tuples(st.just("finish")),
)


def nth_write(fault: Fault, n: int) -> Callable[[Call], Fault | None]:
    """Only the n-th write from now on meets it."""
    left = [n]

    def due(call: Call) -> Fault | None:
        left[0] -= 1
        return fault if left[0] == -1 else None

    return due


async def take(world: FakeCluster, step: tuple[object, ...]) -> None:
    match step:
        case ("look", fault, int(n)):
            world.api.fault = (
                nth_write(FAULTS[str(fault)], n) if fault is not None else lambda call: None
            )
            await world.look()
            world.api.fault = lambda call: None
        case ("sync", which):
            children = list(world.cluster.children)
            world.sync(
                {"jobs": [JOBS], "pods": [PODS], "children": children, "all": None}[str(which)]
            )
        case ("fail", str(name), str(kind)):
            fail(world, name, kind)
        case ("delete", str(name)) if name in world.pods():
            world.api.remove(PODS, ObjectKey("default", name))
        case ("edit", str(kind)):
            edit(world, kind)
        case ("wait", int(seconds)):
            world.now += seconds
        case ("kubelet",):
            world.run_pods()
        case ("failover",):
            world.restart_operator()
        case ("finish",) if is_running(world, "sums-trainer-0"):
            world.end("sums-trainer-0", "trainer", 0)


def is_running(world: FakeCluster, name: str) -> bool:
    pod = world.pods().get(name)
    return (
        pod is not None
        and pod["status"]["phase"] == "Running"
        and "deletionTimestamp" not in pod["metadata"]
    )


def fail(world: FakeCluster, name: str, kind: str) -> None:
    if not is_running(world, name):
        return
    container = CONTAINERS[name.split("-")[1]]
    match kind:
        case "error":
            world.end(name, container, 1)
        case "memory":
            world.end(name, container, 137, reason="OOMKilled")
        case "evicted":
            world.end(name, container, 137, pod_reason="Evicted")
        case "container":
            world.end(name, container, 1, phase="Running")
        case "vanished":
            world.api.remove(PODS, ObjectKey("default", name), 0)


def edit(world: FakeCluster, kind: str) -> None:
    if kind in ("suspend", "resume"):
        world.change(suspend=kind == "suspend")
    elif kind == "restart":
        world.change(restart={"id": str(world.api.version)})
    elif kind == "invalid":
        world.change(actors={"replicas": 0})
    else:
        world.change(
            actors={
                "replicas": {"one": 1, "two": 2, "three": 3, "valid": 2}[kind],
                "minReplicas": 1,
            }
        )


def check(world: FakeCluster) -> None:
    """What must hold once everything is quiet."""
    spec = world.api.objects[JOBS, JOB]["spec"]
    pods = world.pods()
    if world.status.is_finished:
        assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods.values())
        return
    assert world.is_in(JobPhase.RUNNING)
    wanted = {f"sums-actor-{index}" for index in range(spec["actors"]["replicas"])} | set(NAMES[2:])
    assert set(pods) == wanted
    assert all(pod["status"]["phase"] == "Running" for pod in pods.values())
    for name, attempt in world.attempts().items():
        role, index = name.split("-")[1:]
        assert attempt == world.status.attempts.get(
            "trainer" if role == "trainer" else f"{role}-{index}", 0
        )
    assert world.status.actors.ready == spec["actors"]["replicas"]
    assert (CONFIG_MAPS, ObjectKey("default", "sums-job")) in world.api.objects


async def live(steps: list[tuple[object, ...]]) -> None:
    world = FakeCluster()
    policy = {
        "maxRestarts": 1000,
        "backoff": {"initialSeconds": 1, "maxSeconds": 4},
        "terminatingPodTimeoutSeconds": 30,
    }
    await world.submit(job(failurePolicy=policy))
    for step in steps:
        await take(world, step)
        assert world.violations == []
    edit(world, "valid")
    world.change(suspend=False)
    world.now += 120  # past the time for which a refusal is believed
    await world.settle(rounds=200)
    assert world.violations == []
    check(world)
    before = world.num_writes()
    world.restart_operator()
    await world.settle(rounds=30)
    assert world.num_writes() == before, "a quiet resync of a new leader writes nothing"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=5, max_size=40))
def test_every_job_converges_through_faults_crashes_and_stale_stores(
    steps: list[tuple[object, ...]],
) -> None:
    asyncio.run(live(steps))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FAULTS)),
    st.integers(0, 18),
    st.sampled_from(["error", "memory", "evicted", "vanished"]),
)
def test_one_fault_at_any_write_of_a_jobs_life_changes_nothing_in_the_end(
    fault: str, n: int, kind: str
) -> None:
    """Writes 0 to 12 are of its beginning, 13 to 18 of the trainers' return."""

    async def settle(world: FakeCluster) -> None:
        await world.settle(rounds=200)
        world.now += 120  # past the time for which a refusal is believed
        await world.settle(rounds=200)

    async def one() -> None:
        world = FakeCluster()
        await world.submit(job())
        world.api.fault = nth_write(FAULTS[fault], n)
        await settle(world)
        fail(world, "sums-trainer-1", kind)
        await settle(world)
        world.api.fault = lambda call: None
        check(world)
        assert set(world.attempts().values()) <= {0, 1}
        assert {name for name, attempt in world.attempts().items() if attempt} == {
            "sums-trainer-0",
            "sums-trainer-1",
        }
        assert world.violations == []

    asyncio.run(one())
