"""Publication beside training: real gRPC, groups and receivers, with weights of a few numbers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from trainer_fake_services import DEADLINE_S, Coordinator, Preprocessor, serving, until
from trainer_harness import free_ports

from pipelinerl.v1 import policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.errors import FatalError, PermanentError, Refused, Unavailable
from pipelinerl_trainer import publisher
from pipelinerl_trainer.membership import FULL_NAME, Membership, PolicyServicer
from pipelinerl_trainer.publisher import Offer, Publisher
from pipelinerl_weights.errors import TransferFailed, TransferTimeout
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.rendezvous import scope
from pipelinerl_weights.snapshot import WeightSnapshot
from pipelinerl_weights.store import GroupStore

MANIFEST = Manifest(
    (TensorSpec("weight", "float32", (3,)), TensorSpec("bias", "float32", (1,))), bucket_bytes=16
)
UPDATE_S = 10.0


def offer(version: int) -> Offer:
    tensors = [("weight", torch.full((3,), float(version))), ("bias", torch.zeros(1))]
    return Offer(WeightSnapshot.pack(MANIFEST, tensors), version)


@dataclass
class Harness:
    publisher: Publisher
    membership: Membership
    servicer: PolicyServicer
    coordinator: Coordinator
    marked: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Versions that the staleness policy holds back."""
    is_preprocessor_away: bool = False

    def served(self) -> float:
        return float(self.coordinator.weights["weight"][0])


@asynccontextmanager
async def publishing(*, may_roll_back: bool = False) -> AsyncIterator[Harness]:
    """A publisher with its servers; the group is not formed yet."""
    coordinator = Coordinator()
    async with AsyncExitStack() as stack:
        peers = await stack.enter_async_context(serving(Preprocessor(), coordinator))
        channel = await stack.enter_async_context(
            rpc.connect(peers.coordinator_address, token=None)
        )
        membership = Membership("127.0.0.1")
        stack.push_async_callback(membership.aclose)
        servicer = PolicyServicer(membership)

        async def mark(version: int) -> None:
            if harness.is_preprocessor_away:
                raise Unavailable("away")
            harness.marked.append(version)

        async def may_publish(version: int) -> bool:
            if harness.is_preprocessor_away:
                raise Unavailable("away")
            harness.asked.append(version)
            await asyncio.sleep(0)
            return version not in harness.held

        publisher = Publisher(
            channel, mark, may_publish, timeout_s=UPDATE_S, may_roll_back=may_roll_back
        )
        membership.on_change = publisher.wake
        harness = Harness(publisher, membership, servicer, coordinator)
        service = rpc.RpcService(policy_pb2_grpc.add_PolicyServicer_to_server, servicer, FULL_NAME)
        server = await stack.enter_async_context(
            rpc.serve("127.0.0.1:0", [service], token=None, grace_s=0.5)
        )
        coordinator.trainer = server.address
        servicer.open(lambda: 7)
        task = asyncio.create_task(publisher.run(membership))
        try:
            yield harness
            assert not task.done()
        finally:
            task.cancel()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(task, return_exceptions=True)


async def test_the_newest_offer_is_sent_once_the_group_is_there_and_then_marked() -> None:
    async with publishing() as harness:
        for version in (1, 2, 3):
            harness.publisher.offer(offer(version))
        await harness.coordinator.form()
        await until(lambda: harness.marked == [3], "marking version 3")
        assert harness.coordinator.versions == [3]
        assert harness.served() == 3.0
        status = harness.publisher.status
        assert (status.served_version, status.num_updates, status.num_failures) == (3, 1, 0)
        assert (status.pause_s, status.transfer_s, status.apply_s) == (0.25, 0.5, 0.125)
        assert 0 < status.publish_s < UPDATE_S


async def test_the_manifest_is_sent_until_an_epochs_first_success_and_again_in_the_next() -> None:
    async with publishing() as harness:
        harness.coordinator.die_before_receiving = True
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(lambda: not harness.coordinator.die_before_receiving, "the failed update")
        await harness.coordinator.form()
        for versions in ([1], [1, 2], [1, 2, 3]):
            harness.publisher.offer(offer(versions[-1]))
            await until(lambda: harness.marked == versions, "the publication")  # noqa: B023
        await harness.coordinator.form()
        await until(lambda: harness.coordinator.versions == [1, 2, 3, 3], "version 3 once more")
        assert harness.coordinator.manifests == [(2, True), (2, False), (2, False), (3, True)]


async def test_an_offer_that_is_overtaken_while_the_group_is_looked_at_is_not_sent() -> None:
    async with publishing() as harness:
        newer = [offer(2)]

        def offer_newer() -> None:
            if newer:
                harness.publisher.offer(newer.pop())

        harness.coordinator.on_probe = offer_newer
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(lambda: harness.marked == [2], "marking version 2")
        assert harness.coordinator.versions == [2]


async def test_a_version_is_held_back_until_the_policy_lets_it_go_but_never_for_a_new_group() -> (
    None
):
    async with publishing() as harness:
        harness.held = {1, 2}
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(lambda: harness.marked == [1], "the first publication")
        assert not harness.asked
        harness.publisher.offer(offer(2))
        await until(lambda: len(harness.asked) > 2, "the question")
        assert harness.served() == 1
        harness.held = {3}
        await until(lambda: harness.marked == [1, 2], "the publication")
        harness.publisher.offer(offer(3))
        await until(lambda: harness.asked[-1] == 3, "the question")
        await harness.coordinator.form()
        await until(lambda: harness.marked == [1, 2, 3], "the publication to the new group")
        assert harness.served() == 3


async def test_a_new_epoch_gets_the_same_version_again() -> None:
    async with publishing() as harness:
        harness.publisher.offer(offer(5))
        await harness.coordinator.form()
        await until(lambda: harness.publisher.status.num_updates == 1, "the first update")
        await harness.coordinator.form()
        await until(lambda: harness.coordinator.versions == [5, 5], "the update of the new epoch")


async def test_a_restored_trainer_may_roll_back_once_in_each_epoch() -> None:
    async with publishing(may_roll_back=True) as harness:
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(lambda: harness.coordinator.versions == [1], "version 1")
        harness.publisher.offer(offer(2))
        await until(lambda: harness.coordinator.versions == [1, 2], "version 2")
        await harness.coordinator.form()
        await until(
            lambda: harness.coordinator.versions == [1, 2, 2], "version 2 in the next epoch"
        )
        assert harness.coordinator.rollbacks == [True, False, True]


async def test_a_coordinator_that_is_away_is_waited_for_and_the_group_is_left_alone() -> None:
    async with publishing() as harness:
        await harness.coordinator.form()
        harness.coordinator.is_away = True
        harness.publisher.offer(offer(1))
        await until(lambda: harness.membership.group is not None, "the group")
        harness.publisher.offer(offer(2))
        harness.coordinator.is_away = False
        harness.publisher.wake()
        await until(lambda: harness.coordinator.versions == [2], "version 2")
        assert harness.publisher.status.num_failures == 0
        assert harness.coordinator.epoch == 1


async def test_a_refusal_ends_the_group_and_the_next_one_gets_the_weights() -> None:
    async with publishing() as harness:
        harness.coordinator.refuse_next = True
        harness.publisher.offer(offer(4))
        await harness.coordinator.form()
        await until(lambda: harness.publisher.status.num_failures == 1, "the failure")
        assert harness.membership.epoch == 0  # the coordinator sees that a new group is needed
        await harness.coordinator.form()
        await until(lambda: harness.marked == [4], "version 4")


async def test_a_receiver_that_leaves_fails_the_update_at_once_and_training_is_not_told() -> None:
    async with publishing() as harness:
        harness.coordinator.die_before_receiving = True
        harness.publisher.offer(offer(4))
        await harness.coordinator.form()
        await until(
            lambda: harness.publisher.status.num_failures == 1,
            "the failure",
            timeout_s=UPDATE_S / 2,
        )
        assert harness.marked == []
        harness.publisher.offer(offer(5))
        await harness.coordinator.form()
        await until(lambda: harness.marked == [5], "version 5")


async def test_a_sender_that_no_abort_wakes_ends_the_process_instead_of_blocking_later_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    monkeypatch.setattr(publisher, "send_snapshot", lambda *_: released.wait(DEADLINE_S))
    async with publishing() as harness:
        harness.publisher.wake_s = 0.2
        harness.coordinator.refuse_next = True
        await harness.coordinator.form()
        await until(lambda: harness.membership.group is not None, "the group")
        group = harness.membership.group
        assert group is not None
        try:
            with pytest.raises(FatalError, match="sending version 4 did not end"):
                await harness.publisher._publish(offer(4), group, harness.membership.epoch)
        finally:
            released.set()


async def test_marking_is_tried_until_the_preprocessor_is_there_and_skips_what_was_overtaken() -> (
    None
):
    async with publishing() as harness:
        harness.is_preprocessor_away = True
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(lambda: harness.coordinator.versions == [1], "version 1")
        harness.publisher.offer(offer(2))
        await until(lambda: harness.coordinator.versions == [1, 2], "version 2")
        harness.is_preprocessor_away = False
        await until(lambda: harness.marked == [2], "marking version 2")


async def test_finish_waits_for_a_transfer_under_way() -> None:
    async with publishing() as harness:
        harness.publisher.offer(offer(1))
        await harness.coordinator.form()
        await until(
            lambda: harness.publisher._sending.locked() or bool(harness.coordinator.versions),
            "the transfer",
        )
        await harness.publisher.finish(UPDATE_S)
        assert harness.coordinator.versions == [1]


async def ask(harness: Harness, **fields: Any) -> policy_pb2.JoinGroupResponse:
    request: dict[str, Any] = {
        "epoch": 1,
        "world_size": 2,
        "backend": "gloo",
        "port": 0,
        "timeout_s": 5.0,
        **fields,
    }
    async with rpc.connect(harness.coordinator.trainer, token=None) as channel:
        method = policy_pb2_grpc.PolicyStub(channel).JoinGroup
        return await rpc.call(method, policy_pb2.JoinGroupRequest(**request), timeout_s=10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epoch": 0}, "epoch=0 must be at least 1"),
        ({"world_size": 0}, "world_size=0 must be at least 1"),
        ({"backend": "mpi"}, "backend='mpi' must be one of gloo, nccl"),
        ({"port": 70000}, "port=70000 must be at most 65535"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0"),
    ],
)
async def test_join_group_names_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    async with publishing() as harness:
        with pytest.raises(PermanentError, match=message):
            await ask(harness, **fields)


async def test_an_epoch_must_be_newer_while_there_is_a_group() -> None:
    async with publishing() as harness:
        await harness.coordinator.form()
        await until(lambda: harness.membership.group is not None, "the group")
        with pytest.raises(Refused, match="epoch 1 is not newer than the current one, 1"):
            await ask(harness, epoch=1)
        assert (await harness.coordinator.policy()).epoch == 1


async def test_a_group_of_one_leaves_every_group_and_is_told_as_an_epoch() -> None:
    async with publishing() as harness:
        await harness.coordinator.form()
        await until(lambda: harness.membership.group is not None, "the group")
        await ask(harness, epoch=2, world_size=1)
        assert harness.membership.group is None
        policy = await harness.coordinator.policy()
        assert (policy.epoch, policy.policy_version) == (2, 7)
        assert not policy.HasField("manifest")  # a probe each second is no place for it


async def test_a_newer_group_replaces_one_that_never_forms() -> None:
    async with publishing() as harness:
        harness.publisher.offer(offer(1))
        await ask(harness, epoch=1)  # its receiver never comes
        harness.coordinator.epoch = 1
        await harness.coordinator.form()
        await until(lambda: harness.coordinator.versions == [1], "version 1 in epoch 2")


async def test_a_group_that_is_replaced_while_it_forms_ends_for_all_who_wait_and_frees_its_port() -> (  # noqa: E501
    None
):
    port = int(free_ports(1)[0])
    async with publishing() as harness:
        await ask(harness, epoch=1, world_size=3, port=port, timeout_s=DEADLINE_S)
        joining = asyncio.to_thread(
            TransferGroup.join,
            "127.0.0.1",
            port,
            rank=1,
            world_size=3,
            backend="gloo",
            epoch=1,
            timeout_s=DEADLINE_S,
        )
        receiver = asyncio.create_task(joining)
        store = await asyncio.to_thread(GroupStore.connect, "127.0.0.1", port, DEADLINE_S, scope(1))
        with closing(store):
            await until(
                lambda: store.check(["joined/1"]), "the receiver that waits for the third member"
            )
        assert (await ask(harness, epoch=2, port=port)).master_port == port
        with pytest.raises(
            TransferFailed
        ) as ended:  # by the flag, or by the end of the store behind it
            await receiver
        assert not isinstance(ended.value, TransferTimeout)


async def test_the_group_is_joined_with_the_device_that_nccl_sends_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def join(*_: object, device: torch.device, **__: object) -> None:
        asked.append(device)
        raise TransferFailed("no device here")

    monkeypatch.setattr(TransferGroup, "join", join)
    async with aclosing(Membership("127.0.0.1", torch.device("cuda", 3))) as membership:
        await membership.join(1, 2, "nccl", 0, 5.0)
        await until(lambda: bool(asked), "the join")
    assert asked == [torch.device("cuda", 3)]


async def test_before_the_model_is_loaded_the_answer_is_unavailable() -> None:
    servicer = PolicyServicer(Membership("127.0.0.1"))
    with pytest.raises(Unavailable, match="still loading"):
        await servicer.GetPolicy(policy_pb2.GetPolicyRequest(), None)
