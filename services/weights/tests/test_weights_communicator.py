"""Groups on the strict fake of NCCL: a member that is lost at any instant costs the others one
failed transfer, and leaves nothing pending.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest
import torch
from weights_fakes import FakeNetwork
from weights_harness import prompt

from pipelinerl_common.errors import SettingsError
from pipelinerl_weights import group as group_module
from pipelinerl_weights.agreement import post_blocks
from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout
from pipelinerl_weights.group import Rendezvous, TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.nccl import require_cuda
from pipelinerl_weights.rendezvous import scope
from pipelinerl_weights.slices import whole_tensors
from pipelinerl_weights.snapshot import TensorAssembly, WeightSnapshot
from pipelinerl_weights.store import GroupStore
from pipelinerl_weights.transfer import SendReport, receive, send_snapshot

MANIFEST = Manifest(
    tuple(TensorSpec(f"w{index}", "float32", (64,)) for index in range(12)), bucket_bytes=512
)
SNAPSHOT = WeightSnapshot.pack(
    MANIFEST, ((spec.name, torch.randn(64)) for spec in MANIFEST.tensors)
)
LIMIT_S = 30.0


class Outcome:
    """What a thread returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.result: object = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def wait(self, limit_s: float = 10.0) -> "Outcome":
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "a thread is stuck"
        return self


@contextmanager
def groups(
    network: FakeNetwork,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int = 3,
    timeout_s: float = LIMIT_S,
    late_s: float = 0.0,
) -> Iterator[list[TransferGroup]]:
    """A group's members in threads of this process; the last rank joins `late_s` later."""
    connectors = {**group_module.CONNECTORS, "nccl": network.connector}
    monkeypatch.setattr(group_module, "CONNECTORS", connectors)
    rendezvous = Rendezvous.open("127.0.0.1", 0, world_size)

    def join(rank: int) -> TransferGroup:
        if rank == world_size - 1:
            time.sleep(late_s)
        return TransferGroup.join(
            "127.0.0.1",
            rendezvous.port,
            rank=rank,
            world_size=world_size,
            backend="nccl",
            epoch=1,
            timeout_s=timeout_s,
            store=rendezvous if rank == 0 else None,
        )

    joining = [Outcome(partial(join, rank)) for rank in range(world_size)]
    members = [outcome.wait().result for outcome in joining]
    assert all(isinstance(member, TransferGroup) for member in members), joining[0].error
    try:
        yield members  # type: ignore[misc] # checked above
    finally:
        for member in members:
            member.close()  # type: ignore[attr-defined]


def receiving(group: TransferGroup, taken: dict[str, torch.Tensor] | None = None) -> Outcome:
    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if taken is not None:
            taken.update(tensors)

    sink = TensorAssembly(MANIFEST, load, whole_tensors(MANIFEST))
    return Outcome(lambda: receive(group, MANIFEST, 1, LIMIT_S, sink))


@pytest.mark.parametrize("launch_s", [0.0, 0.003])
def test_bytes_arrive_although_calls_are_launched_late(
    monkeypatch: pytest.MonkeyPatch, launch_s: float
) -> None:
    with groups(FakeNetwork(launch_s), monkeypatch) as members:
        taken: dict[str, torch.Tensor] = {}
        receivers = [receiving(members[1], taken), receiving(members[2])]
        report = send_snapshot(members[0], SNAPSHOT, 1, LIMIT_S)
        assert [each.wait().result for each in receivers] == [report.checksum] * 2
        assert all(torch.equal(taken[name], tensor) for name, tensor in SNAPSHOT.tensors())


@pytest.mark.parametrize("reports_errors", [False, True])
def test_every_survivor_aborts_its_own_communicator(
    monkeypatch: pytest.MonkeyPatch, reports_errors: bool
) -> None:
    network = FakeNetwork(reports_errors=reports_errors)
    with groups(network, monkeypatch) as members:
        post_blocks(members[2], "needs", MANIFEST, whole_tensors(MANIFEST))
        members[2].mark_receiving(1)
        survivor = receiving(members[1])
        network.kill(2)
        with pytest.raises(TransferFailed):
            send_snapshot(members[0], SNAPSHOT, 1, 0.5)
        assert isinstance(survivor.wait().error, TransferFailed)
        for rank in (0, 1):  # an engine that pauses synchronises its device
            library = next(each for each in network.libraries if each.rank == rank)
            assert library.stream.synchronize(5.0), f"rank {rank}: a kernel still spins"
        assert not [thread for thread in threading.enumerate() if "bury" in thread.name]


def test_a_late_member_does_not_shorten_the_deadlines_of_later_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with groups(FakeNetwork(), monkeypatch, timeout_s=3.0, late_s=2.0) as members:
        receivers = [receiving(members[1]), receiving(members[2])]
        members[0].wait_all_receiving(1, LIMIT_S)
        pending = members[0].start_exchange([(SNAPSHOT.buffer, 1)], [], LIMIT_S)
        assert pending.deadline - time.monotonic() > LIMIT_S - 5
        members[0].abort("enough")
        assert all(isinstance(each.wait().error, TransferAborted) for each in receivers)


def test_a_member_that_dies_while_the_others_connect_fails_them_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting never ends then, whatever the library promises."""
    network = FakeNetwork()
    connectors = {**group_module.CONNECTORS, "nccl": network.connector}
    monkeypatch.setattr(group_module, "CONNECTORS", connectors)
    rendezvous = Rendezvous.open("127.0.0.1", 0, 2)
    # Rank 1 says that it has joined, and is gone before it connects.
    lost = GroupStore.connect("127.0.0.1", rendezvous.port, 5.0, scope(1))
    lost.set("joined/1", "1")
    lost.close()
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="did not connect in time"):
        TransferGroup.join(
            "127.0.0.1",
            rendezvous.port,
            rank=0,
            world_size=2,
            backend="nccl",
            epoch=1,
            timeout_s=1.0,
            store=rendezvous,
        )
    assert time.monotonic() - began < 4.0
    deadline = time.monotonic() + 5.0
    while not network.libraries[0].is_freed:  # aborted on a thread of its own
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("reports_errors", [False, True])
def test_a_member_killed_at_any_instant_costs_one_transfer(
    monkeypatch: pytest.MonkeyPatch, reports_errors: bool
) -> None:
    """100 random instants; the survivors then transfer in a group of their own."""
    chance = random.Random(7)
    for _ in range(100):
        network = FakeNetwork(chance.choice([0.0, 0.001]), reports_errors)
        victim, survivor = chance.sample([1, 2], 2)
        with prompt(10.0), groups(network, monkeypatch) as members:
            outcomes = {rank: receiving(members[rank]) for rank in (1, 2)}
            killer = threading.Timer(chance.uniform(0, 0.04), network.kill, args=(victim,))
            killer.start()
            sending = Outcome(lambda: send_snapshot(members[0], SNAPSHOT, 1, 0.4)).wait()
            killer.join()
            if sending.error is not None:
                assert isinstance(sending.error, TransferFailed)
                assert isinstance(outcomes[survivor].wait().error, TransferFailed)
            else:  # it died at the end, which the survivor may have seen before its own
                outcome = outcomes[survivor].wait()
                report = cast(SendReport, sending.result)
                assert outcome.result == report.checksum or isinstance(
                    outcome.error, TransferFailed
                )
        for library in network.libraries:
            assert library.stream.synchronize(5.0), "a kernel still spins"
    with groups(FakeNetwork(), monkeypatch, world_size=2) as members:
        outcome = receiving(members[1])
        report = send_snapshot(members[0], SNAPSHOT, 1, LIMIT_S)
        assert outcome.wait().result == report.checksum


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old"), "driver on your system is"),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled with CUDA"),
        (None, "no device is visible"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named_with_torchs_reason(
    error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(SettingsError, match=f"actors.gpusPerReplica gives .*{reason}.*gloo"):
        require_cuda("actors.gpusPerReplica")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_cuda("actors.gpusPerReplica")
