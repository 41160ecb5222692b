"""Receivers as real processes, started once and driven over a pipe."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from pipelinerl_weights.agreement import post_blocks
from pipelinerl_weights.group import Rendezvous, TransferGroup
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.slices import whole_tensors
from pipelinerl_weights.snapshot import TensorAssembly
from pipelinerl_weights.transfer import receive

TIMEOUT_S = 60.0


class Peer:
    """One receiver process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()

    def start(self, verb: str, *args: Any) -> None:
        self._pipe.send((verb, args))

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the verb returned; ("failed", type name, message) if it raised."""
        assert self._pipe.poll(timeout_s), "the peer did not answer"
        return self._pipe.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = _Receiver(pipe)
    while True:
        verb, args = pipe.recv()
        try:
            pipe.send(getattr(state, verb)(*args))
        except Exception as error:  # noqa: BLE001 - reported to the test
            pipe.send(("failed", type(error).__name__, str(error)))


class _Receiver:
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.group: TransferGroup | None = None

    def join(self, port: int, rank: int, world_size: int, epoch: int, timeout_s: float) -> str:
        if self.group:
            self.group.close()
        self.group = TransferGroup.join(
            "127.0.0.1",
            port,
            rank=rank,
            world_size=world_size,
            backend="gloo",
            epoch=epoch,
            timeout_s=timeout_s,
        )
        return "joined"

    def receive(self, manifest: Manifest, version: int, timeout_s: float, fault: str = "") -> Any:
        """Returns (checksum, tensors). `fault`: "announce" reports when the first tensors came,
        "raise" raises then.
        """
        assert self.group is not None
        tensors: dict[str, torch.Tensor] = {}

        def load(arrived: Iterable[tuple[str, torch.Tensor]]) -> None:
            if fault == "raise":
                raise ValueError("no room")
            if fault == "announce" and not tensors:
                self.pipe.send("first tensors")
            tensors.update(arrived)

        sink = TensorAssembly(manifest, load, whole_tensors(manifest))
        checksum = receive(self.group, manifest, version, timeout_s, sink)
        return checksum, {
            name: (tensor.dtype, tuple(tensor.shape), _raw(tensor))
            for name, tensor in tensors.items()
        }

    def mark(self, manifest: Manifest, version: int) -> str:
        """Does all that a receiver does before the first bytes."""
        assert self.group is not None
        post_blocks(self.group, "needs", manifest, whole_tensors(manifest))
        self.group.mark_receiving(version)
        return "marked"

    def close(self) -> str:
        assert self.group is not None
        self.group.close()
        return "closed"


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@contextlib.contextmanager
def form(peers: list[Peer], epoch: int, timeout_s: float = TIMEOUT_S) -> Iterator[TransferGroup]:
    """The sender's group, with every peer joined."""
    world_size = 1 + len(peers)
    rendezvous = Rendezvous.open("127.0.0.1", 0, world_size)
    for rank, peer in enumerate(peers, start=1):
        peer.start("join", rendezvous.port, rank, world_size, epoch, timeout_s)
    with TransferGroup.join(
        "127.0.0.1",
        rendezvous.port,
        rank=0,
        world_size=world_size,
        backend="gloo",
        epoch=epoch,
        timeout_s=timeout_s,
        store=rendezvous,
    ) as group:
        assert [peer.result() for peer in peers] == ["joined"] * len(peers)
        yield group


@contextlib.contextmanager
def prompt(limit_s: float = 20.0) -> Iterator[None]:
    """The body must end well before any deadline of the transfer itself (60 s)."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s
