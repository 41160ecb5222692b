"""What a job's runtime in the leader reads from its pods."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import aiohttp
import pytest
from operator_fakes import CONTEXT, JOB, FakeCluster, job

from pipelinerl_common.metrics import PREPROCESSOR, TRAINER, Metrics, serve_metrics
from pipelinerl_control.scaling import ScalingChoice
from pipelinerl_operator.controller import job_runtime
from pipelinerl_operator.controller.decision import Wanted
from pipelinerl_operator.controller.job_runtime import JobRuntime
from pipelinerl_operator.controller.status import JobStatus, RoleStatus
from pipelinerl_operator.kube import Object, ObjectKey
from pipelinerl_operator.kube.resources import PODS
from pipelinerl_operator.objects import JobResource, desired_objects

HOSTS = {"sums-trainer-0": "127.0.0.2", "sums-preprocessor-0": "127.0.0.3"}


class Running:
    """A job whose trainer and preprocessor export the metrics that a test sets."""

    def __init__(self, world: FakeCluster, session: aiohttp.ClientSession) -> None:
        self.trainer, self.preprocessor = Metrics(TRAINER, "sums"), Metrics(PREPROCESSOR, "sums")
        self.world = world
        self._session = session
        view = world.cluster.jobs.get(JOB)
        assert view is not None
        resource = JobResource.parse(view.body)
        self.runtime = JobRuntime(
            view,
            Wanted(resource, desired_objects(resource, CONTEXT)),
            world.status,
            "token",
            world.cluster,
        )

    async def step(self, step: int, num_groups: int) -> None:
        self.trainer.gauge("policy_version").set(step)
        self.preprocessor.counter("groups_trained_total").inc(num_groups)
        await self.runtime.read(self._session)

    def steps(self) -> tuple[int, int] | None:
        balance = self.runtime.report().balance
        return None if balance is None else (balance.begin_step, balance.step)


def _move(host: str, body: Object) -> None:
    body["status"]["podIP"] = host


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    with socket.create_server((HOSTS["sums-trainer-0"], 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(job_runtime, "METRICS_PORT", port)
    world = FakeCluster()
    await world.submit(job())
    await world.settle()
    for name, host in HOSTS.items():
        world.api.edit(PODS, ObjectKey("default", name), partial(_move, host))
    world.sync()
    async with AsyncExitStack() as stack:
        job_ = Running(world, await stack.enter_async_context(aiohttp.ClientSession()))
        for metrics, host in (
            (job_.trainer, HOSTS["sums-trainer-0"]),
            (job_.preprocessor, HOSTS["sums-preprocessor-0"]),
        ):
            await stack.enter_async_context(serve_metrics(f"{host}:{port}", metrics.exposition))
        yield job_


async def test_the_balance_grows_from_the_first_reading_on(running: Running) -> None:
    await running.step(3, 8)
    assert running.steps() is None
    await running.step(5, 16)
    await running.step(9, 32)
    assert running.steps() == (3, 9)
    report = running.runtime.report()
    assert report.balance is not None
    assert report.balance.num_actors == 2
    assert report.balance.ratio == 1.0
    assert report.training is not None
    assert report.training.step == 9


async def test_a_look_at_it_begins_it_anew(running: Running) -> None:
    await running.step(3, 8)
    await running.step(13, 80)
    status = JobStatus(autoscale=ScalingChoice(actors=2, start=2, step=13, ratio=1.0))
    running.runtime.update(status, 1)
    assert running.steps() is None
    await running.step(14, 8)
    running.runtime.update(status, 1)
    assert running.steps() == (13, 14)


async def test_an_actor_that_is_gone_begins_it_anew(running: Running) -> None:
    await running.step(3, 8)
    await running.step(13, 80)
    running.world.api.remove(PODS, ObjectKey("default", "sums-actor-1"), 0)
    running.world.sync()
    await running.step(14, 8)
    assert running.steps() is None
    await running.step(15, 8)
    assert running.steps() == (14, 15)


async def test_the_metrics_say_how_many_actors_there_are_and_why(running: Running) -> None:
    actors = RoleStatus(desired=3, ready=2)
    running.runtime.update(JobStatus(actors=actors), 1)
    text = running.runtime.metrics().exposition().decode()
    assert 'pipelinerl_actors_desired{job="sums",namespace="default",role="coordinator"} 3' in text
    assert 'pipelinerl_actors_ready{job="sums",namespace="default",role="coordinator"} 2' in text
    assert "pipelinerl_autoscale_ratio{" not in text
    running.runtime.update(
        JobStatus(actors=actors, autoscale=ScalingChoice(actors=3, start=2, step=10, ratio=0.975)),
        1,
    )
    text = running.runtime.metrics().exposition().decode()
    assert (
        'pipelinerl_autoscale_ratio{job="sums",namespace="default",role="coordinator"} 0.975'
        in text
    )
