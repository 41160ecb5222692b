"""Transfers between real processes over gloo on the loopback interface, and everything that can go
wrong with them.
"""

import contextlib
import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weights_harness import TIMEOUT_S, Peer, form, prompt

from pipelinerl_common.errors import PermanentError
from pipelinerl_weights.errors import TransferAborted, TransferFailed, TransferTimeout
from pipelinerl_weights.group import Rendezvous, TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.slices import num_bytes, region
from pipelinerl_weights.snapshot import WeightSnapshot, even_extents
from pipelinerl_weights.transfer import send_snapshot

MANIFEST = Manifest(
    (
        TensorSpec("matrix", "float32", (3, 5)),
        TensorSpec("odd", "bfloat16", (7,)),
        TensorSpec("half", "float16", (2, 1, 3)),
        TensorSpec("larger.than.a.bucket", "float32", (33, 1000)),
        TensorSpec("bytes", "int8", (3,)),
        TensorSpec("scalar", "float64", ()),
        TensorSpec("empty", "float32", (0, 4)),
        TensorSpec("flags", "bool", (5,)),
    ),
    bucket_bytes=1024,
)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: (torch.randn(spec.shape, generator=generator) * 100).to(
            getattr(torch, spec.dtype)
        )
        for spec in MANIFEST.tensors
    }


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Peer]]:
    peers = [Peer() for _ in range(2)]
    yield peers
    for peer in peers:
        peer.stop()


@pytest.fixture
def peers(pool: list[Peer]) -> list[Peer]:
    """Two live receivers; those that a test killed are replaced."""
    for index, peer in enumerate(pool):
        if not peer.process.is_alive():
            pool[index] = Peer()
    return pool


def test_every_receiver_gets_the_exact_bytes(peers: list[Peer]) -> None:
    with form(peers, epoch=1) as group:
        for version in (0, 1, 1):
            sent = tensors(seed=version)
            snapshot = WeightSnapshot.pack(MANIFEST, sent.items())
            for peer in peers:
                peer.start("receive", MANIFEST, version, TIMEOUT_S)
            report = send_snapshot(group, snapshot, version, TIMEOUT_S)
            for peer in peers:
                checksum, received = peer.result()
                assert checksum == report.checksum
                assert received == {
                    name: (t.dtype, tuple(t.shape), raw(t)) for name, t in sent.items() if t.numel()
                }
            # Both are on the sender's host: each gets its own copy from it.
            assert 2 * snapshot.num_bytes <= report.num_bytes <= 2.1 * snapshot.num_bytes


def test_the_pace_is_kept(peers: list[Peer]) -> None:
    snapshot = WeightSnapshot.pack(MANIFEST, tensors(0).items())
    with form(peers, epoch=1) as group:
        for peer in peers:
            peer.start("receive", MANIFEST, 1, TIMEOUT_S)
        report = send_snapshot(
            group, snapshot, 1, TIMEOUT_S, pace_bytes_per_s=snapshot.num_bytes / 0.4
        )
        assert report.seconds >= 0.4
        assert [peer.result()[0] for peer in peers] == [report.checksum] * 2


def test_an_abort_wakes_waiting_receivers_at_once_and_the_next_epoch_works(
    peers: list[Peer],
) -> None:
    with form(peers, epoch=1) as group:
        for peer in peers:
            peer.start("receive", MANIFEST, 3, TIMEOUT_S)
        group.wait_all_receiving(3, TIMEOUT_S)
        with prompt():
            group.abort("a generator refused version 3")
            for peer in peers:
                assert peer.result() == (
                    "failed",
                    "TransferAborted",
                    "a generator refused version 3",
                )
        with pytest.raises(TransferAborted, match="refused version 3"):
            send_snapshot(group, WeightSnapshot.pack(MANIFEST, tensors(3).items()), 3, TIMEOUT_S)
    test_every_receiver_gets_the_exact_bytes(peers)


def test_an_abort_wakes_a_sender_that_waits_for_receivers(peers: list[Peer]) -> None:
    with form(peers, epoch=1) as group:
        peers[0].start("mark", MANIFEST, 3)
        assert peers[0].result() == "marked"
        timer = threading.Timer(0.2, group.abort, args=("the POST failed",))
        timer.start()
        with prompt(), pytest.raises(TransferAborted, match="the POST failed"):
            group.wait_all_receiving(3, TIMEOUT_S)
        timer.join()


def test_an_abort_in_the_middle_wakes_everyone(peers: list[Peer]) -> None:
    snapshot = WeightSnapshot.pack(MANIFEST, tensors(0).items())
    with form(peers, epoch=1) as group:
        peers[0].start("receive", MANIFEST, 1, TIMEOUT_S, "announce")
        peers[1].start("receive", MANIFEST, 1, TIMEOUT_S)
        failures: list[str] = []

        def send() -> None:
            try:
                send_snapshot(
                    group, snapshot, 1, TIMEOUT_S, pace_bytes_per_s=snapshot.num_bytes / TIMEOUT_S
                )
            except TransferAborted as error:
                failures.append(str(error))

        thread = threading.Thread(target=send)
        thread.start()
        assert peers[0].result() == "first tensors"
        with prompt():
            group.abort("training ends")
            thread.join()
            assert failures == ["training ends"]
            assert [peer.result() for peer in peers] == [
                ("failed", "TransferAborted", "training ends")
            ] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_receiver_that_dies_fails_the_sender_and_the_others_promptly(
    peers: list[Peer], victim: int
) -> None:
    with form(peers, epoch=1) as group:
        peers[victim].start("mark", MANIFEST, 1)
        peers[1 - victim].start("receive", MANIFEST, 1, TIMEOUT_S)
        assert peers[victim].result() == "marked"
        peers[victim].stop()
        with prompt(), pytest.raises(TransferFailed):
            send_snapshot(group, WeightSnapshot.pack(MANIFEST, tensors(1).items()), 1, TIMEOUT_S)
        with prompt():
            assert peers[1 - victim].result()[0] == "failed"


def test_a_sender_that_dies_fails_the_receivers_promptly() -> None:
    receivers = [Peer(), Peer()]
    try:
        with form(receivers, epoch=1) as group:
            for peer in receivers:
                peer.start("receive", MANIFEST, 1, TIMEOUT_S)
            group.wait_all_receiving(1, TIMEOUT_S)
            # Leaving the block closes the store and every connection, as the end of the process
            # does.
        with prompt():
            assert [peer.result()[0] for peer in receivers] == ["failed", "failed"]
    finally:
        for peer in receivers:
            peer.stop()


@pytest.mark.timeout(300)
def test_a_process_killed_at_any_instant_costs_one_transfer() -> None:
    """20 random instants, over gloo: the survivor gets the next version in a group without it."""
    chance = random.Random(11)
    survivor = Peer()
    snapshot = WeightSnapshot.pack(MANIFEST, tensors(0).items())
    pace = 2 * snapshot.num_bytes / 0.3
    try:
        for trial in range(20):
            victim = Peer()
            pair = [survivor, victim] if trial % 2 else [victim, survivor]
            with form(pair, epoch=2 * trial + 1) as group:
                for peer in pair:
                    peer.start("receive", MANIFEST, trial, TIMEOUT_S)
                killer = threading.Timer(chance.uniform(0, 0.4), victim.stop)
                killer.start()
                with prompt(), contextlib.suppress(TransferFailed):
                    send_snapshot(group, snapshot, trial, TIMEOUT_S, pace)
                killer.join()
            with prompt():
                survivor.result()  # what it received, or that the transfer failed
            with form([survivor], epoch=2 * trial + 2) as group:
                survivor.start("receive", MANIFEST, trial, TIMEOUT_S)
                report = send_snapshot(group, snapshot, trial, TIMEOUT_S)
                assert survivor.result()[0] == report.checksum
    finally:
        survivor.stop()


def test_a_stopped_receiver_ends_at_the_deadline_and_frees_the_others(peers: list[Peer]) -> None:
    large = Manifest(
        (TensorSpec("large", "float32", (4 << 20,)),), bucket_bytes=1024
    )  # more than a socket buffers
    snapshot = WeightSnapshot.pack(large, [("large", torch.zeros(4 << 20))])
    with form(peers, epoch=1) as group:
        peers[0].start("mark", large, 1)
        assert peers[0].result() == "marked"
        os.kill(int(peers[0].process.pid or 0), signal.SIGSTOP)
        peers[1].start("receive", large, 1, TIMEOUT_S)
        with prompt(), pytest.raises(TransferTimeout, match=r"exchange|the end of"):
            send_snapshot(group, snapshot, 1, timeout_s=1.0)
        with prompt():
            assert peers[1].result()[0] == "failed"
        peers[0].stop()


def test_a_receiver_that_is_not_ready_is_named(peers: list[Peer]) -> None:
    with form(peers, epoch=1) as group:
        peers[0].start("receive", MANIFEST, 1, TIMEOUT_S)
        with pytest.raises(TransferTimeout, match=r"rank 2 did not get ready"):
            send_snapshot(
                group, WeightSnapshot.pack(MANIFEST, tensors(1).items()), 1, timeout_s=0.5
            )
        with prompt():
            assert peers[0].result()[:2] == ("failed", "TransferAborted")


def test_a_receiver_that_expects_another_version_is_named(peers: list[Peer]) -> None:
    with form(peers, epoch=1) as group:
        peers[0].start("receive", MANIFEST, 1, TIMEOUT_S)
        peers[1].start("receive", MANIFEST, 2, TIMEOUT_S)
        with pytest.raises(
            TransferFailed, match="rank 2 expects version 2, but 1 is about to be sent"
        ):
            send_snapshot(group, WeightSnapshot.pack(MANIFEST, tensors(1).items()), 1, TIMEOUT_S)
        with prompt():
            assert [peer.result()[1] for peer in peers] == ["TransferAborted"] * 2


def test_a_receiver_that_cannot_take_a_bucket_fails_everyone(peers: list[Peer]) -> None:
    with form(peers, epoch=1) as group:
        peers[0].start("receive", MANIFEST, 1, TIMEOUT_S, "raise")
        peers[1].start("receive", MANIFEST, 1, TIMEOUT_S)
        with prompt(), pytest.raises(TransferFailed, match="no room"):
            send_snapshot(group, WeightSnapshot.pack(MANIFEST, tensors(1).items()), 1, TIMEOUT_S)
        with prompt():
            assert peers[0].result() == ("failed", "ValueError", "no room")
            assert peers[1].result()[:2] == ("failed", "TransferAborted")


def test_a_rank_that_never_joins_is_named_and_the_others_go_on(peers: list[Peer]) -> None:
    rendezvous = Rendezvous.open("127.0.0.1", 0, 3)
    peers[0].start("join", rendezvous.port, 1, 3, 1, TIMEOUT_S)
    with pytest.raises(TransferTimeout, match=r"rank 2 did not join"):
        TransferGroup.join(
            "127.0.0.1",
            rendezvous.port,
            rank=0,
            world_size=3,
            backend="gloo",
            epoch=1,
            timeout_s=1.0,
            store=rendezvous,
        )
    with prompt():
        assert peers[0].result()[0] == "failed"


def test_joining_where_nobody_listens_ends_at_the_deadline() -> None:
    free = Rendezvous.open("127.0.0.1", 0, 2)
    port = free.port
    free.close()
    with prompt(), pytest.raises(TransferTimeout, match=f"127.0.0.1:{port}"):
        TransferGroup.join(
            "127.0.0.1", port, rank=1, world_size=2, backend="gloo", epoch=1, timeout_s=0.5
        )


def test_an_unknown_backend_and_a_taken_port_are_named() -> None:
    with pytest.raises(
        TransferFailed, match="unknown backend 'carrier-pigeon'; known are gloo, nccl"
    ):
        TransferGroup.join(
            "127.0.0.1", 0, rank=0, world_size=1, backend="carrier-pigeon", epoch=1, timeout_s=5.0,
            store=Rendezvous.open("127.0.0.1", 0, 1),
        )  # fmt: skip
    taken = Rendezvous.open("127.0.0.1", 0, 1)
    with pytest.raises(TransferFailed, match=f"cannot listen on port {taken.port}"):
        Rendezvous.open("127.0.0.1", taken.port, 1)


def test_a_snapshot_casts_and_refuses_what_does_not_fit() -> None:
    manifest = Manifest(
        (TensorSpec("w", "bfloat16", (2,)), TensorSpec("b", "float32", (1,))), bucket_bytes=64
    )
    snapshot = WeightSnapshot.pack(
        manifest, [("b", torch.tensor([1.0])), ("w", torch.tensor([1.0, 2.0]))]
    )
    assert dict(snapshot.tensors())["w"].tolist() == [1.0, 2.0]
    with pytest.raises(PermanentError, match=r"1 tensor.*w"):
        WeightSnapshot.pack(manifest, [("b", torch.tensor([1.0]))])
    with pytest.raises(PermanentError, match="x is not in the manifest"):
        WeightSnapshot.pack(manifest, [("x", torch.tensor([1.0]))])
    with pytest.raises(PermanentError, match=r"w has shape \(3,\), the manifest says \(2,\)"):
        WeightSnapshot.pack(manifest, [("w", torch.zeros(3))])


@given(st.integers(1, 9))
def test_even_shares_are_all_items_once(num_ranks: int) -> None:
    items: Counter[tuple[int, int]] = Counter()
    sizes = []
    for rank in range(num_ranks):
        extents = even_extents(MANIFEST, rank, num_ranks)
        items.update((each.tensor, item) for each in extents for item in range(*each[1:]))
        sizes.append(WeightSnapshot.empty(MANIFEST, extents).num_bytes)
    expected = {
        (index, item)
        for index, spec in enumerate(MANIFEST.tensors)
        for item in range(math.prod(spec.shape))
    }
    assert set(items) == expected
    assert set(items.values()) == {1}
    assert max(sizes) - min(sizes) < 16 * len(MANIFEST.tensors) + 8


def test_what_a_share_holds_is_what_was_packed() -> None:
    sent = tensors(seed=5)
    for rank in range(3):
        share = WeightSnapshot.empty(MANIFEST, even_extents(MANIFEST, rank, 3))
        share.fill(sent.items())
        for block in share.holds:
            spec = MANIFEST.tensors[block.tensor]
            expected = region(sent[spec.name], block).contiguous()
            buffer = torch.empty(num_bytes(MANIFEST, block), dtype=torch.uint8)
            share.read([(block, buffer)])
            assert bytes(buffer.numpy()) == raw(expected)
