"""The weight-transfer group as pods see it: real generator processes that come, die and come back
under other addresses, the real coordinator, which another replica may take over, and the trainer's
own side of the group.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from actor_generator_harness import (
    TOKEN,
    Client,
    GeneratorProcess,
    Reference,
    manifest_of,
    write_job,
)

from pipelinerl.v1 import policy_pb2_grpc
from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_common import rpc
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.service import serve_coordinator
from pipelinerl_trainer.membership import FULL_NAME, Membership, PolicyServicer
from pipelinerl_trainer.publisher import Offer, Publisher
from pipelinerl_weights.group import Pending, TransferGroup
from pipelinerl_weights.snapshot import WeightSnapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DEADLINE_S = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weight-group")
    make_tiny_model(folder / "model")
    return folder


@dataclass
class Pods:
    """Generators by name. A restarted one has another address, as a pod has."""

    folder: Path
    running: dict[str, GeneratorProcess] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    """What the operator knows of them."""

    async def start(self, *names: str) -> None:
        for name in names:
            if name in self.running:
                self.running[name].kill()
        job = write_job(self.folder, engine="transformers")
        started = {name: GeneratorProcess(self.folder, job) for name in names}
        self.running.update(started)
        for name, process in started.items():
            self.urls[name] = await asyncio.to_thread(getattr, process, "url")

    def signal(self, name: str, number: signal.Signals) -> None:
        os.killpg(self.running[name].process.pid, number)

    async def version(self, name: str) -> int:
        return int((await Client(self.urls[name]).weights())["version"])

    def is_alive(self, name: str) -> bool:
        return self.running[name].process.poll() is None


@pytest.fixture
def pods(folder: Path) -> Iterator[Pods]:
    pods = Pods(folder)
    yield pods
    for process in pods.running.values():
        process.kill()


class Exchanges:
    """Does something before an exchange of the trainer's, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = 0
        self._act: Callable[[], object] = lambda: None
        start = TransferGroup.start_exchange

        def start_exchange(group: TransferGroup, *args: Any) -> Pending:
            self._left -= 1
            if self._left == 0:
                self._act()
            return start(group, *args)

        monkeypatch.setattr(TransferGroup, "start_exchange", start_exchange)

    def before(self, number: int, act: Callable[[], object]) -> None:
        """`number` counts from 1, from now on."""
        self._left, self._act = number, act


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Exchanges:
    return Exchanges(monkeypatch)


@dataclass
class Harness:
    """One job's trainer side, and the coordinator that is there at the moment."""

    folder: Path
    pods: Pods
    settings: WeightTransferSettings
    publisher: Publisher
    membership: Membership
    trainer_address: str
    coordinator_address: str
    marked: list[int]

    def offer(self, version: int) -> None:
        weights = Reference(self.folder / "model").random(version)
        self.publisher.offer(
            Offer(WeightSnapshot.pack(manifest_of(weights), weights.items()), version)
        )

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Coordinator]:
        """A replica of the operator that leads while the block runs; without the grace of a proper
        goodbye.
        """
        serving = serve_coordinator(
            self.settings,
            lambda: dict(self.pods.urls),
            trainer_address=self.trainer_address,
            listen=self.coordinator_address,
            token=TOKEN,
        )
        async with serving as running:
            task = asyncio.create_task(running.coordinator.run())
            try:
                yield running.coordinator
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def until_served(self, version: int, *names: str) -> None:
        async def served() -> bool:
            return [await self.pods.version(name) for name in names] == [version] * len(names)

        await until(
            lambda: bool(self.marked) and self.marked[-1] == version,
            f"marking {version} (marked {self.marked})",
        )
        async with asyncio.timeout(DEADLINE_S):
            while not await served():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def epoch_of(coordinator: Coordinator, *members: str) -> int:
    assert coordinator.group is not None
    assert coordinator.group.names == members
    return coordinator.group.epoch


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None


@asynccontextmanager
async def harness(folder: Path, pods: Pods, *, sync_timeout_s: float) -> AsyncIterator[Harness]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        coordinator_address = f"127.0.0.1:{probe.getsockname()[1]}"
    marked: list[int] = []

    async def mark(version: int) -> None:
        marked.append(version)

    async def may_publish(version: int) -> bool:
        return True

    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(rpc.connect(coordinator_address, token=TOKEN))
        membership = Membership("127.0.0.1")
        stack.push_async_callback(membership.aclose)
        servicer = PolicyServicer(membership)
        publisher = Publisher(
            channel, mark, may_publish, timeout_s=sync_timeout_s, may_roll_back=False
        )
        membership.on_change = publisher.wake
        service = rpc.RpcService(policy_pb2_grpc.add_PolicyServicer_to_server, servicer, FULL_NAME)
        server = await stack.enter_async_context(
            rpc.serve("127.0.0.1:0", [service], token=TOKEN, grace_s=0.5)
        )
        servicer.open(lambda: 0)
        publishing = asyncio.create_task(publisher.run(membership))
        settings = WeightTransferSettings(
            backend="gloo", form_timeout_seconds=60, sync_timeout_seconds=sync_timeout_s
        )
        try:
            yield Harness(
                folder,
                pods,
                settings,
                publisher,
                membership,
                server.address,
                coordinator_address,
                marked,
            )
            assert not publishing.done()
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)


async def test_a_generator_killed_in_the_middle_of_a_transfer_costs_nobody_else_anything(
    folder: Path, pods: Pods, exchanges: Exchanges
) -> None:
    await pods.start("actor-0/generator-0", "actor-1/generator-0")
    stays, dies = pods.urls
    async with (
        harness(folder, pods, sync_timeout_s=DEADLINE_S) as home,
        home.operator() as coordinator,
    ):
        home.offer(1)
        await home.until_served(1, stays, dies)
        exchanges.before(3, lambda: pods.signal(dies, signal.SIGKILL))
        started = asyncio.get_running_loop().time()
        home.offer(2)
        await home.until_served(2, stays)
        assert (
            asyncio.get_running_loop().time() - started < home.settings.sync_timeout_seconds / 2
        )  # seen, not waited for
        epoch = epoch_of(coordinator, stays)
        assert pods.is_alive(stays)
        assert home.publisher.status.num_failures == 1

        await pods.start(dies)  # the pod that takes its place: same name, other address
        home.offer(3)
        home.offer(4)
        await home.until_served(4, stays, dies)
        assert epoch_of(coordinator, stays, dies) > epoch
        assert home.publisher.status.num_failures == 1


async def test_a_machine_that_goes_silent_costs_one_sync_timeout(folder: Path, pods: Pods) -> None:
    await pods.start("actor-0/generator-0", "actor-1/generator-0")
    stays, hangs = pods.urls
    async with harness(folder, pods, sync_timeout_s=8.0) as home, home.operator() as coordinator:
        home.offer(1)
        await home.until_served(1, stays, hangs)
        pods.signal(hangs, signal.SIGSTOP)
        home.offer(2)
        await home.until_served(2, stays)
        assert home.publisher.status.num_failures == 1
        assert coordinator.counters.update_failures == 1
        assert pods.is_alive(stays)
        pods.signal(hangs, signal.SIGCONT)
        await home.until_served(
            2, stays, hangs
        )  # it catches up by itself, with the version that was missed


async def test_training_goes_on_without_an_operator_and_catches_up_with_the_next_replica(
    folder: Path, pods: Pods, exchanges: Exchanges
) -> None:
    await pods.start("actor-0/generator-0")
    (name,) = pods.urls
    async with harness(folder, pods, sync_timeout_s=30.0) as home:
        async with home.operator() as first:
            home.offer(1)
            await home.until_served(1, name)
            epoch = epoch_of(first, name)
        for version in (2, 3, 4):
            home.offer(version)
        await asyncio.sleep(1.0)  # long enough for a trainer that did not wait for an operator
        assert home.marked == [1]
        assert await pods.version(name) == 1

        leaving = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with home.operator() as second:
            await home.until_served(4, name)
            assert epoch_of(second, name) > epoch
            assert home.marked == [1, 4]
            epoch = epoch_of(second, name)
            exchanges.before(3, lambda: loop.call_soon_threadsafe(leaving.set))
            home.offer(5)
            async with asyncio.timeout(DEADLINE_S):
                await leaving.wait()  # its lease is lost in the middle of an update
        async with home.operator() as third:
            home.offer(6)
            await home.until_served(6, name)
            assert epoch_of(third, name) > epoch
        assert pods.is_alive(name)
