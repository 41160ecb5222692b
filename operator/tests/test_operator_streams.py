"""A job and its streams on the server, which may be unreachable, full, or back without its disk."""

import asyncio
import base64
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from operator_fakes import JOB, FakeCluster

from pipelinerl_common.errors import Unavailable
from pipelinerl_operator.controller.status import JobPhase
from pipelinerl_operator.kube import ObjectKey
from pipelinerl_operator.kube.resources import JOBS, SECRETS
from pipelinerl_operator.objects import JobResource

TOKEN = (SECRETS, ObjectKey("default", "sums-token"))


@dataclass
class Admin:
    """The stream's server: says no when the test says so."""

    fault: str = ""
    ensured: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    async def ensure(self, job: JobResource) -> str:
        if self.fault:
            raise Unavailable(self.fault)
        self.ensured.append(job.uid)
        return f"login of {job.uid}"

    async def remove(self, job: JobResource) -> bool:
        self.removed.append(job.uid)
        return True

    async def sweep(self, uids: Callable[[], Collection[str]], namespaces: Collection[str]) -> int:
        return 0


def world_with(admin: Admin) -> FakeCluster:
    world = FakeCluster()
    world.admin = admin
    world.restart_operator()
    return world


async def running(admin: Admin) -> FakeCluster:
    world = world_with(admin)
    await world.submit()
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    return world


def secret_of(world: FakeCluster) -> dict[str, str]:
    return {
        name: base64.b64decode(value).decode()
        for name, value in world.api.objects[TOKEN]["data"].items()
    }


async def test_a_job_waits_for_its_place_and_says_so() -> None:
    admin = Admin(fault="the stream's server has no room")
    world = world_with(admin)
    await world.submit()
    for _ in range(6):
        world.sync()
        await world.look()
        world.now += 2
    assert world.pods() == {}
    condition = world.status.condition("Provisioned")
    assert condition is not None
    assert (condition.reason, condition.message) == (
        "StreamUnavailable",
        "the stream's server has no room",
    )
    admin.fault = ""
    await world.settle()
    assert world.is_in(JobPhase.RUNNING)
    assert (
        secret_of(world)["nats.creds"]
        == f"login of {world.api.objects[JOBS, JOB]['metadata']['uid']}"
    )


async def test_a_new_leader_starts_pods_again_while_the_streams_server_is_away() -> None:
    admin = Admin()
    world = await running(admin)
    admin.fault = "away"
    world.restart_operator()
    world.end("sums-actor-0", "rollout", 1)
    await world.settle()
    assert world.attempts()["sums-actor-0"] == 1
    assert world.is_in(JobPhase.RUNNING)


async def test_a_secret_that_somebody_deleted_comes_back_with_the_same_token() -> None:
    world = await running(Admin())
    before = secret_of(world)
    world.api.remove(*TOKEN, 0)
    world.now += 700
    await world.settle()
    assert secret_of(world) == before
    assert world.violations == []


async def test_a_finished_job_gives_its_place_up_once_its_pods_have_ended() -> None:
    admin = Admin()
    world = await running(admin)
    uid = world.api.objects[JOBS, JOB]["metadata"]["uid"]
    world.end("sums-trainer-0", "trainer", 0)
    world.sync()
    await world.look()
    assert world.is_in(JobPhase.SUCCEEDED)
    assert admin.removed == []
    await world.settle()
    await asyncio.sleep(0.01)  # it is removed beside the reconciliation
    assert admin.removed == [uid]
    world.restart_operator()
    await world.settle()
    await asyncio.sleep(0.01)
    assert admin.removed == [uid, uid]  # a new leader cannot know, and it does no harm
