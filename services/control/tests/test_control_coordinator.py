"""The coordinator over real HTTP and gRPC, against generators and a trainer that the test
directs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc, weights_pb2, weights_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.errors import Refused, Unavailable
from pipelinerl_common.generator_api import UnknownManifest, WeightsResponse
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.coordinator import Coordinator
from pipelinerl_control.service import weight_transfer
from pipelinerl_weights.manifest import Manifest

TOKEN = "secret"
MANIFEST = weights_pb2.WeightManifest(
    tensors=[weights_pb2.TensorSpec(name="w", dtype="float32", shape=[2, 3])], bucket_bytes=1024
)


@dataclass
class FakeGenerator:
    """Replies as a generator. `on_update` and `on_join`: "ok", an HTTP status, "hang", "cut"."""

    name: str
    num_workers: int = 1
    epoch: int = 0
    version: int = -1
    on_update: str | int = "ok"
    on_join: str | int = "ok"
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Probes wait for it; it is set at the start."""
    is_old: bool = False
    """Whether it is of a release in which manifests had no hashes."""
    manifests: set[str] = field(default_factory=set)
    num_unknown: int = 0
    joins: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    update_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    updated: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event | None = None
    """Updates wait for it, when given, before they behave as directed."""
    runner: web.AppRunner | None = None
    url: str = ""

    async def start(self, port: int = 0) -> None:
        self.answers.set()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/weights", self._weights)
        app.router.add_post("/init_process_group", self._join)
        app.router.add_post("/request_weight_update", self._update)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.released.set()
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def restart(self) -> None:
        port = int(self.url.rpartition(":")[2])
        await self.stop()
        self.epoch, self.version = 0, -1
        self.released = asyncio.Event()
        await self.start(port)

    async def _health(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        return web.json_response({})

    async def _weights(self, request: web.Request) -> web.Response:
        weights = WeightsResponse(
            version=self.version,
            checksum=None,
            epoch=self.epoch,
            num_workers=self.num_workers,
            num_running=0,
            updates_total=0,
            update_failures_total=0,
            draining=False,
        )
        return web.json_response(weights.model_dump())

    async def _join(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.joins.append(body)
        return await self._behave(request, self.on_join, lambda: self._joined(body))

    def _joined(self, body: dict[str, Any]) -> dict[str, Any]:
        self.epoch = body["epoch"]
        self.manifests.clear()
        self.joined.set()
        return {"epoch": body["epoch"], "ranks": [body["rank_offset"]]}

    async def _update(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        if self.is_old and "manifest_hash" in body:
            return error_response(422, "manifest: Field required", self.version)
        if "manifest_hash" in body and body["manifest_hash"] not in self.manifests:
            self.num_unknown += 1
            return error_response(409, "unknown manifest", self.version, UnknownManifest.__name__)
        if "manifest" in body:
            self.manifests.add(Manifest.from_json(body["manifest"]).hash)
        self.updates.append(body)
        self.update_arrived.set()
        if self.hold is not None:
            await self.hold.wait()
        return await self._behave(request, self.on_update, lambda: self._updated(body))

    def _updated(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["version"]
        self.updated.set()
        return {
            "version": body["version"],
            "checksum": "abc",
            "pause_s": 0.1,
            "transfer_s": 0.5,
            "apply_s": 0.05,
            "num_running": 3,
        }

    async def _behave(
        self, request: web.Request, behaviour: str | int, succeed: Callable[[], dict[str, Any]]
    ) -> web.Response:
        if behaviour == "hang":
            await self.released.wait()
            return error_response(500, "group aborted", self.version)
        if behaviour == "cut":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(behaviour, int):
            return error_response(behaviour, "refused by the test", self.version)
        return web.json_response(succeed())


def error_response(
    status: int, message: str, serving_version: int, kind: str = "test"
) -> web.Response:
    body = {"error": {"message": message, "type": kind, "serving_version": serving_version}}
    return web.json_response(body, status=status)


class FakeTrainer(policy_pb2_grpc.PolicyServicer):
    """A trainer without collectives. A new group releases the generators that hang in the old one,
    as a real abort does.
    """

    def __init__(self, generators: list[FakeGenerator]) -> None:
        self.epoch = 0
        self.joined: list[tuple[int, int]] = []
        self.generators = generators

    async def AwaitGroup(
        self, request: policy_pb2.AwaitGroupRequest, context: object
    ) -> policy_pb2.AwaitGroupResponse:
        raise NotImplementedError

    async def JoinGroup(
        self, request: policy_pb2.JoinGroupRequest, context: Any
    ) -> policy_pb2.JoinGroupResponse:
        if request.epoch <= self.epoch:
            raise Refused(f"epoch {request.epoch} is not newer than {self.epoch}")
        self.epoch = request.epoch
        self.joined.append((request.epoch, request.world_size))
        for generator in self.generators:
            generator.released.set()
            generator.released = asyncio.Event()
        return policy_pb2.JoinGroupResponse(master_address="127.0.0.1", master_port=4711)

    async def GetPolicy(
        self, request: policy_pb2.GetPolicyRequest, context: Any
    ) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(policy_version=3, epoch=self.epoch)


@dataclass
class Harness:
    coordinator: Coordinator
    trainer: FakeTrainer
    generators: dict[str, FakeGenerator]
    address: str

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Reconciles until the condition holds."""
        try:
            async with asyncio.timeout(20):
                while not holds():
                    await self.coordinator.reconcile()
        except TimeoutError:
            pytest.fail(f"never came true: {what}; waiting for {self.coordinator.waiting_for}")

    async def until_members(self, *names: str) -> None:
        await self.until(
            f"members {names}", lambda: self.members == names and self.trainer.epoch == self.epoch
        )

    @property
    def members(self) -> tuple[str, ...] | None:
        return self.coordinator.group.names if self.coordinator.group else None

    @property
    def epoch(self) -> int:
        return self.coordinator.group.epoch if self.coordinator.group else 0

    async def publish(
        self,
        version: int,
        epoch: int | None = None,
        timeout_s: float = 5,
        *,
        manifest: weights_pb2.WeightManifest | None = MANIFEST,
    ) -> weights_pb2.PublishVersionResponse:
        request = weights_pb2.PublishVersionRequest(
            epoch=self.epoch if epoch is None else epoch,
            policy_version=version,
            manifest=manifest,
            timeout_s=timeout_s,
        )
        async with rpc.connect(self.address, token=TOKEN) as channel:
            return await rpc.call(
                weights_pb2_grpc.WeightTransferStub(channel).PublishVersion, request, timeout_s=30
            )

    async def get_group(self) -> weights_pb2.GetGroupResponse:
        async with rpc.connect(self.address, token=TOKEN) as channel:
            stub = weights_pb2_grpc.WeightTransferStub(channel)
            return await rpc.call(stub.GetGroup, weights_pb2.GetGroupRequest(), timeout_s=5)


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await event.wait()


@asynccontextmanager
async def running(
    *names: str, workers: int = 1, form_timeout_s: float = 5, settle_s: float = 0
) -> AsyncIterator[Harness]:
    generators = {name: FakeGenerator(name, num_workers=workers) for name in names}
    trainer = FakeTrainer(list(generators.values()))
    settings = WeightTransferSettings(
        backend="gloo", form_timeout_seconds=form_timeout_s, sync_timeout_seconds=5
    )
    async with AsyncExitStack() as stack:
        for generator in generators.values():
            await generator.start()
            stack.push_async_callback(generator.stop)
        policy = rpc.RpcService(
            policy_pb2_grpc.add_PolicyServicer_to_server, trainer, "pipelinerl.v1.Policy"
        )
        trainer_server = await stack.enter_async_context(
            rpc.serve("127.0.0.1:0", [policy], token=TOKEN)
        )
        coordinator = Coordinator(
            settings,
            lambda: {name: generator.url for name, generator in generators.items()},
            lambda: trainer_server.address,
            token=TOKEN,
            settle_s=settle_s,
        )
        stack.push_async_callback(coordinator.close)
        service = weight_transfer(lambda context: coordinator)
        server = await stack.enter_async_context(rpc.serve("127.0.0.1:0", [service], token=TOKEN))
        yield Harness(coordinator, trainer, generators, server.address)


async def test_generators_join_with_their_own_ranks_and_are_updated() -> None:
    async with running("a", "b", workers=2) as harness:
        await harness.until_members("a", "b")
        joins = [harness.generators[name].joins[-1] for name in ("a", "b")]
        assert [(join["epoch"], join["rank_offset"], join["world_size"]) for join in joins] == [
            (1, 1, 5),
            (1, 3, 5),
        ]
        assert joins[0]["backend"] == "gloo"
        assert (joins[0]["master_address"], joins[0]["master_port"]) == ("127.0.0.1", 4711)
        response = await harness.publish(3)
        assert response.published
        assert [
            (m.generator, m.ok, m.policy_version, m.checksum, m.num_running)
            for m in response.members
        ] == [
            ("a", True, 3, "abc", 3),
            ("b", True, 3, "abc", 3),
        ]
        assert response.members[0].pause_s == pytest.approx(0.1)
        update = harness.generators["a"].updates[-1]
        assert update["manifest"] == {
            "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3]}],
            "bucket_bytes": 1024,
        }
        assert (update["epoch"], update["version"], update["mode"], update["kv_cache"]) == (
            1,
            3,
            "staged",
            "keep",
        )
        group = await harness.get_group()
        assert (group.epoch, list(group.members), group.served_version) == (1, ["a", "b"], 3)


async def test_who_is_there_waits_only_for_who_is_starting() -> None:
    async with running("a", "b", settle_s=60) as harness:
        await harness.generators["b"].stop()
        await harness.coordinator.reconcile()
        assert harness.coordinator.waiting_for == "others may join too"
        await harness.generators["b"].restart()
        await harness.coordinator.reconcile()
        assert harness.members == ("a", "b")


async def test_one_that_has_returned_joins_when_it_has_stayed() -> None:
    async with running("a", "b", settle_s=60) as harness:
        await harness.until_members("a", "b")
        await harness.generators["b"].stop()
        await harness.until_members("a")
        await harness.generators["b"].restart()
        await harness.coordinator.reconcile()
        assert harness.members == ("a",)


async def test_wrong_epoch_is_refused_and_reaches_no_generator() -> None:
    async with running("a") as harness:
        await harness.until_members("a")
        with pytest.raises(Refused, match="not the current one"):
            await harness.publish(3, epoch=9)
        assert harness.generators["a"].updates == []


async def test_publish_before_a_group_exists_is_refused() -> None:
    async with running("a") as harness:
        with pytest.raises(Refused, match="being formed"):
            await harness.publish(3, epoch=1)


async def test_the_manifest_travels_once_in_an_epoch_and_again_in_the_next() -> None:
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        with pytest.raises(Refused, match="must carry the manifest"):
            await harness.publish(3, manifest=None)
        assert (await harness.publish(3)).published
        assert (await harness.publish(4, manifest=None)).published
        assert (await harness.publish(5)).published  # a trainer that did not get its last answer
        expected = Manifest.from_proto(MANIFEST)
        for generator in (harness.generators["a"], harness.generators["b"]):
            first, *later = generator.updates
            assert Manifest.from_json(first["manifest"]) == expected
            assert "manifest_hash" not in first
            assert [update["manifest_hash"] for update in later] == [expected.hash] * 2
            assert not any("manifest" in update for update in later)
            assert generator.num_unknown == 1
        await harness.generators["b"].stop()
        await harness.until_members("a")
        with pytest.raises(Refused, match="must carry the manifest"):
            await harness.publish(6, manifest=None)
        assert (await harness.publish(6)).published
        assert "manifest" in harness.generators["a"].updates[-1]
        assert harness.coordinator.counters.expulsions == 0


async def test_a_generator_of_an_earlier_release_gets_the_manifest_with_every_update() -> None:
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        harness.generators["b"].is_old = True
        for version in (3, 4):
            assert (await harness.publish(version)).published
        assert ["manifest" in update for update in harness.generators["a"].updates] == [True, False]
        assert ["manifest" in update for update in harness.generators["b"].updates] == [True, True]


async def test_leaver_is_dropped_and_the_rest_goes_on() -> None:
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        await harness.generators["b"].stop()
        await harness.until_members("a")
        assert harness.epoch == 2
        assert (await harness.publish(4)).published


async def test_last_leaver_leaves_a_world_of_one_and_publishing_is_unavailable() -> None:
    async with running("a") as harness:
        await harness.until_members("a")
        await harness.generators["a"].stop()
        await harness.until_members()
        assert harness.trainer.joined[-1] == (2, 1)
        with pytest.raises(Unavailable, match="no generator"):
            await harness.publish(4)
        assert (await harness.get_group()).served_version == -1


async def test_generator_that_restarts_between_two_looks_joins_again_and_has_no_version() -> None:
    async with running("a") as harness:
        await harness.until_members("a")
        assert (await harness.publish(3)).published
        await harness.generators["a"].restart()
        await harness.until("a second join", lambda: len(harness.generators["a"].joins) == 2)
        await harness.until_members("a")
        assert harness.epoch == 2
        assert harness.coordinator.served_version == -1


async def test_trainer_restart_forms_a_newer_epoch() -> None:
    async with running("a") as harness:
        await harness.until_members("a")
        harness.trainer.epoch = 0
        await harness.until("the trainer joined again", lambda: harness.trainer.epoch == 2)
        await harness.until_members("a")


async def test_an_epoch_never_comes_again_when_everybody_has_forgotten_it() -> None:
    async with running("a") as harness:
        await harness.until_members("a")
        await harness.generators["a"].stop()
        assert not (await harness.publish(3)).published
        harness.trainer.epoch = 0  # a broken broadcast ends the trainer's group
        await harness.generators["a"].restart()
        await harness.until_members("a")
        assert harness.epoch > 1


@pytest.mark.parametrize("behaviour", [500, 409, "cut"])
async def test_generator_that_fails_to_join_is_left_out_and_comes_back(
    behaviour: str | int,
) -> None:
    async with running("a", "b") as harness:
        harness.generators["b"].on_join = behaviour
        await harness.until_members("a")
        assert (await harness.publish(3)).published
        harness.generators["b"].on_join = "ok"
        await harness.until_members("a", "b")


async def test_a_process_that_takes_an_expelled_ones_name_at_another_address_joins_at_once() -> (
    None
):
    async with running("a", "b") as harness:
        failing = harness.generators["b"]
        failing.on_join = 500
        await harness.until(
            "three failures", lambda: harness.coordinator.counters.expulsions >= 3
        )  # left out for 4 s by now
        await failing.stop()
        failing.on_join, failing.epoch = "ok", 0
        await failing.start()
        await harness.coordinator.reconcile()
        assert harness.members == ("a", "b")


async def test_generator_that_never_answers_the_join_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelinerl_common.generator_client.ANSWER_GRACE_S", 0.1)
    async with running("a", "b", form_timeout_s=0.5) as harness:
        harness.generators["b"].on_join = "hang"
        await harness.until_members("a")


@pytest.mark.parametrize("behaviour", [500, 409, 422, "cut"])
async def test_failing_member_is_expelled_and_those_waiting_for_it_are_released(
    behaviour: str | int,
) -> None:
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        harness.generators["a"].on_update = "hang"  # waits in the collective for b
        harness.generators["b"].on_update = behaviour
        response = await harness.publish(3)
        assert not response.published
        assert [member.ok for member in response.members] == [False, False]
        assert harness.coordinator.counters.updates == 0
        harness.generators["a"].on_update = "ok"
        await harness.until_members("a")
        assert harness.epoch == 3  # 2 ended the broken group
        assert (await harness.publish(3)).published


async def test_member_that_fails_after_another_succeeded_is_expelled_and_the_version_counts() -> (
    None
):
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        late = harness.generators["b"]
        late.on_update, late.hold = 500, asyncio.Event()
        publishing = asyncio.create_task(harness.publish(3))
        await soon(harness.generators["a"].updated)
        late.hold.set()
        response = await publishing
        assert response.published
        assert [(member.generator, member.ok) for member in response.members] == [
            ("a", True),
            ("b", False),
        ]
        await harness.until_members("a")
        assert harness.epoch == 2
        assert harness.coordinator.served_version == 3


async def test_silent_member_is_expelled_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl_common.generator_client.ANSWER_GRACE_S", 0.1)
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        harness.generators["b"].on_update = "hang"
        response = await harness.publish(3, timeout_s=0.5)
        assert response.published  # by a, the only one that remains
        assert "no answer" in response.members[1].error
        await harness.until_members("a")


async def test_a_generator_that_stops_answering_is_silent_until_it_answers_or_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelinerl_control.observer.PROBE_TIMEOUT_S", 0.2)
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        assert harness.coordinator.silent == {}
        harness.generators["b"].answers.clear()
        await harness.until("b is silent", lambda: "b" in harness.coordinator.silent)
        assert list(harness.coordinator.silent) == ["b"]
        assert harness.coordinator.silent["b"] >= 3 * 0.2  # three probes without an answer
        harness.generators["b"].answers.set()
        await harness.until("b answers again", lambda: harness.coordinator.silent == {})
        harness.generators["b"].answers.clear()
        await harness.until("b is silent", lambda: "b" in harness.coordinator.silent)
        await harness.generators["b"].stop()
        await harness.until("b is gone", lambda: harness.coordinator.silent == {})


async def test_group_is_not_formed_again_while_an_update_runs() -> None:
    async with running("a", "b") as harness:
        await harness.until_members("a", "b")
        for generator in harness.generators.values():
            generator.on_update = "hang"
        publishing = asyncio.create_task(harness.publish(3))
        await soon(harness.generators["a"].update_arrived)
        harness.trainer.epoch = 0  # would form a group otherwise
        await harness.coordinator.reconcile()
        assert harness.coordinator.waiting_for == "an update is running"
        with pytest.raises(Refused, match="an update is running"):
            await harness.publish(4, epoch=1)
        for generator in harness.generators.values():
            generator.released.set()
        assert not (await publishing).published
        # The trainer was gone, so no member was to blame: both join at once.
        await harness.until_members("a", "b")
        assert harness.coordinator.counters.expulsions == 0


async def test_run_reconciles_until_cancelled() -> None:
    async with running("a") as harness:
        task = asyncio.create_task(harness.coordinator.run())
        await soon(harness.generators["a"].joined)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
