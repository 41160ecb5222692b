"""The controller on a real API server, with the rights of its own table and no others. There is no
kubelet: pods have no containers, and the test decides how they end.
"""

import asyncio
import gc
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from operator_fakes import CONTEXT, FakeRuntimes, job

from bench.api_server import ApiServer, api_server, missing_binary
from bench.hollow_pods import HollowPods, ended, say
from crd import crd_definition
from pipelinerl_common.errors import TemporaryError
from pipelinerl_operator.controller.cluster import ClusterCache, child_resources
from pipelinerl_operator.controller.controller import Controller
from pipelinerl_operator.controller.events import EventRecorder
from pipelinerl_operator.controller.executor import Dependencies
from pipelinerl_operator.controller.status import JobPhase, JobStatus
from pipelinerl_operator.controller.streams import JobStreams
from pipelinerl_operator.controller.telemetry import Telemetry
from pipelinerl_operator.kube import (
    Api,
    Object,
    ObjectKey,
    Resource,
    Selection,
    WorkQueue,
    open_api,
)
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import EVENTS, JOB_NAMESPACES, JOBS, PODS, SERVICES
from pipelinerl_operator.objects import Capabilities

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding")
TOKEN = secrets.token_hex(8)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    if (
        missing := missing_binary()
    ):  # asked here and not on import: it may be built while the tests before these run
        pytest.skip(f"needs {missing}")
    with api_server({TOKEN: "operator"}) as running:
        asyncio.run(prepare(running))
        yield running


async def prepare(server: ApiServer) -> None:
    """The CRD, and the rights of the operator's own table for the user `operator`."""
    rules = [
        {"apiGroups": [each.group], "resources": [each.resource], "verbs": sorted(each.verbs)}
        for each in JOB_NAMESPACES
    ]
    role = {
        "apiVersion": ROLES.api_version,
        "kind": ROLES.kind,
        "metadata": {"name": "operator"},
        "rules": rules,
    }
    binding = {
        "apiVersion": BINDINGS.api_version,
        "kind": BINDINGS.kind,
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": ROLES.group, "kind": ROLES.kind, "name": "operator"},
        "subjects": [{"apiGroup": ROLES.group, "kind": "User", "name": "operator"}],
    }
    async with open_api(server.administrator) as api:
        await api.create(CRDS, "", crd_definition())
        await api.create(ROLES, "", role)
        await api.create(BINDINGS, "", binding)
        async with asyncio.timeout(60):
            while True:
                try:
                    await api.get(JOBS, "default", "")
                    return
                except NotFound:
                    await asyncio.sleep(0.2)


@dataclass
class Running:
    api: Api
    """The administrator's."""
    telemetry: Telemetry
    tasks: Sequence[asyncio.Task[None]]
    """The controller and the pods' kubelet, which never end."""

    async def until(self, name: str, holds: Callable[[JobStatus], bool]) -> JobStatus:
        status = JobStatus()
        try:
            async with asyncio.timeout(240):
                while not holds(status):
                    await asyncio.sleep(0.2)
                    for task in self.tasks:
                        if task.done():
                            await task
                    with suppress(TemporaryError):  # a busy server asks to come back later
                        status = JobStatus.read(
                            (await self.api.get(JOBS, "default", name)).get("status")
                        )
        except TimeoutError:
            pods = [
                (pod["metadata"]["name"], pod["status"].get("phase"), pod["metadata"])
                for pod in await self.list(PODS)
            ]
            pytest.fail(f"{name} never came to it: {status}\npods: {pods}")
        return status

    async def list(self, resource: Resource) -> list[Object]:
        return [body async for page in self.api.pages(Selection(resource)) for body in page.items]


@asynccontextmanager
async def operating(server: ApiServer) -> AsyncIterator[Running]:
    telemetry = Telemetry(lambda: True)
    async with (
        open_api(server.administrator) as administrator,
        open_api(server.as_user(TOKEN), telemetry.called) as api,
    ):
        capabilities = Capabilities((await api.server_version())[1], await api.api_versions())
        queue = WorkQueue()
        cluster = ClusterCache(child_resources(capabilities.api_versions), queue.add)
        context = CONTEXT.__class__(
            CONTEXT.images, CONTEXT.coordinator, CONTEXT.nats_url, capabilities
        )
        recorder = EventRecorder(api, "test")
        deps = Dependencies(api, cluster, context, FakeRuntimes(), recorder, JobStreams(None))
        controller = Controller(deps, queue, telemetry)
        tasks = [
            asyncio.create_task(controller.run()),
            asyncio.create_task(HollowPods(administrator).run()),
        ]
        try:
            yield Running(administrator, telemetry, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_job_runs_to_its_end_with_exactly_the_rights_of_the_table(
    server: ApiServer,
) -> None:
    async with operating(server) as running:
        await running.api.create(JOBS, "default", job())
        status = await running.until("sums", lambda status: status.phase is JobPhase.RUNNING)
        assert (status.actors.ready, status.trainers.ready, status.preprocessor.ready) == (2, 2, 1)
        service = await running.api.get(SERVICES, "default", "sums")
        assert service["spec"]["clusterIP"] == "None"
        trainer = ObjectKey("default", "sums-trainer-1")
        await say(
            running.api, trainer, ended(await running.api.get(PODS, *trainer), {"trainer": 1})
        )
        status = await running.until(
            "sums", lambda status: status.restarts == 1 and status.phase is JobPhase.RUNNING
        )
        assert status.attempts == {"trainer": 1}
        first = ObjectKey("default", "sums-trainer-0")
        await say(running.api, first, ended(await running.api.get(PODS, *first)))
        await running.until(
            "sums", lambda status: status.phase is JobPhase.SUCCEEDED and status.actors.created == 0
        )
        pods = [
            pod
            for pod in await running.list(PODS)
            if pod["metadata"]["labels"]["pipelinerl.dev/job"] == "sums"
        ]
        assert [pod["metadata"]["name"] for pod in pods] == ["sums-trainer-0"]
        reasons = {event["reason"] for event in await running.list(EVENTS)}
        assert {"Running", "PodFailed", "Succeeded"} <= reasons
        codes = running.telemetry.metrics.values()
        assert [name for name in codes if "api_requests" in name and "code=403" in name] == []


async def test_a_template_that_the_server_refuses_creates_nothing_and_quotes_it(
    server: ApiServer,
) -> None:
    resources = {"limits": {"cpu": "many"}}
    template = {"spec": {"containers": [{"name": "preprocessor", "resources": resources}]}}
    async with operating(server) as running:
        await running.api.create(
            JOBS, "default", job("odd", preprocessor={"podTemplate": template})
        )
        status = await running.until("odd", lambda status: status.phase is JobPhase.INVALID)
        condition = status.condition("Provisioned")
        assert condition is not None
        assert condition.reason == "PodRefused"
        assert "quantities must match the regular expression" in condition.message
        assert [
            pod
            for pod in await running.list(PODS)
            if pod["metadata"]["labels"]["pipelinerl.dev/job"] == "odd"
        ] == []


async def test_suspend_and_resume_by_the_server(server: ApiServer) -> None:
    async with operating(server) as running:
        await running.api.create(JOBS, "default", job("pausing"))
        await running.until("pausing", lambda status: status.phase is JobPhase.RUNNING)
        await running.api.patch(JOBS, "default", "pausing", {"spec": {"suspend": True}})
        await running.until("pausing", lambda status: status.phase is JobPhase.SUSPENDED)
        await running.api.patch(JOBS, "default", "pausing", {"spec": {"suspend": False}})
        await running.until("pausing", lambda status: status.phase is JobPhase.RUNNING)


async def test_a_watch_that_is_given_up_leaves_no_connection(server: ApiServer) -> None:
    address = ("127.0.0.1", int(server.administrator.server.rpartition(":")[2]))
    received = asyncio.Event()

    async def follow(api: Api) -> None:
        async for _ in api.watch(Selection(SERVICES), "0"):
            received.set()

    _, api_process = server.processes
    try:
        async with open_api(server.administrator) as api:
            following = asyncio.create_task(follow(api))
            await received.wait()
            assert len(connections_to(address)) == 1
            api_process.send_signal(signal.SIGSTOP)  # it answers no goodbye
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        assert connections_to(address) == []
    finally:
        api_process.send_signal(signal.SIGCONT)


def connections_to(address: tuple[str, int]) -> list[socket.socket]:
    sockets = [
        each for each in gc.get_objects() if isinstance(each, socket.socket) and each.fileno() >= 0
    ]
    return [each for each in sockets if each.type == socket.SOCK_STREAM and peer(each) == address]


def peer(connection: socket.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:
        return None
