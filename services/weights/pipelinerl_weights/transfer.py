"""One transfer: every trainer rank sends its part of a version, every worker receives what it
needs and passes on what its neighbours need, both by the plan that the group agreed on.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_weights import agreement
from pipelinerl_weights.checksum import chunk_checksum
from pipelinerl_weights.group import Pending, TransferGroup
from pipelinerl_weights.manifest import ALIGNMENT, ITEM_BYTES, Manifest
from pipelinerl_weights.nccl import on_transfer_stream
from pipelinerl_weights.plan import Chunk, PlanPart, Round
from pipelinerl_weights.slices import Block, WeightSink
from pipelinerl_weights.snapshot import WeightSnapshot

_WINDOW = 3
"""Rounds under way: while two are on the wire, the chunks of the one before are copied. It is also
the number of buffers that a sender needs.
"""

Pieces = Sequence[tuple[Block, Tensor]]


@dataclass(frozen=True, slots=True)
class SendReport:
    """The result of a transfer whose bytes every receiver checked."""

    num_bytes: int
    """Bytes that this rank sent, padding included."""
    seconds: float
    """Seconds from the first round to the last receiver's confirmation."""
    checksum: str
    """The version's checksum on rank 0, empty on the trainer's other ranks."""


def send_snapshot(
    group: TransferGroup,
    snapshot: WeightSnapshot,
    version: int,
    timeout_s: float,
    pace_bytes_per_s: float | None = None,
) -> SendReport:
    """Sends this rank's share of `version`; every rank of the trainer calls it. Rank 0 waits until
    every receiver is ready, and collects the checksum. Weights that are sent from a device go
    through buffers of a chunk's size there.

    `pace_bytes_per_s` slows the transfer to that rate, as a slower link would. `timeout_s` is for
    the whole call. Raises TransferAborted, TransferTimeout or TransferFailed; the group is then
    aborted for every member.
    """
    deadline = time.monotonic() + timeout_s
    agreement.post_blocks(group, "holds", snapshot.manifest, snapshot.holds)
    if group.rank == 0:
        group.wait_all_receiving(version, timeout_s)
        agreement.distribute_plan(group, snapshot.manifest, deadline)
        agreement.begin(group)
    else:
        group.begin_transfer()
        agreement.wait_to_begin(group, deadline)
    began = time.monotonic()
    part = agreement.own_part(group, snapshot.manifest)
    with on_transfer_stream(group.device):
        walk = _Walk(group, snapshot.manifest, part, deadline, read=snapshot.read)
        walk.run(pace_bytes_per_s)
        agreement.post_sums(group, walk.sums)
        checksum = agreement.fold_sums(group, deadline) if group.rank == 0 else ""
        group.end_transfer(_remaining(deadline))
    return SendReport(walk.num_bytes_sent, time.monotonic() - began, checksum)


def receive(
    group: TransferGroup, manifest: Manifest, version: int, timeout_s: float, sink: WeightSink
) -> str:
    """Receives what `sink` needs of `version` and returns the version's checksum, the same on every
    rank. Bytes that differ from those sent fail the transfer.

    `sink.write` is called while the next chunks already arrive. `timeout_s` is for the whole call,
    waiting for the sender included. What `sink.write` raises aborts the group. Raises
    TransferAborted, TransferTimeout or TransferFailed; the group is then aborted for every member.
    """
    deadline = time.monotonic() + timeout_s
    agreement.post_blocks(group, "needs", manifest, sink.needs)
    group.mark_receiving(version)
    agreement.wait_to_begin(group, deadline)
    part = agreement.own_part(group, manifest)
    walk = _Walk(group, manifest, part, deadline, write=sink.write)
    walk.run()
    checksum = agreement.check_sums(group, manifest, part, walk.sums, deadline)
    group.end_transfer(_remaining(deadline))
    return checksum


def _no_source(_: Pieces) -> None:
    raise AssertionError("a receiver sends only what it has received")


def _no_sink(_: Pieces) -> None:
    raise AssertionError("a trainer's rank receives nothing")


class _Walk:
    """One rank's way through the rounds of its part: chunks are read or received into buffers,
    checked, written and passed on, and their buffers are used again.
    """

    def __init__(
        self,
        group: TransferGroup,
        manifest: Manifest,
        part: PlanPart,
        deadline: float,
        *,
        read: Callable[[Pieces], None] = _no_source,
        write: Callable[[Pieces], None] = _no_sink,
    ) -> None:
        self._group, self._manifest, self._part, self._deadline = group, manifest, part, deadline
        self._read, self._write = read, write
        self._free: list[Tensor] = []
        self._buffers: dict[int, Tensor] = {}
        """Chunks that are being received, or still to be sent."""
        self._left = Counter(hop.chunk for each in part.rounds for hop in each.sends)
        """Sends to come, by chunk."""
        self._arriving: set[int] = set()
        self._under_way: deque[tuple[Round, Pending]] = deque()
        self.sums: dict[int, Tensor] = {}
        """Checksums by chunk."""
        self.num_bytes_sent = 0

    def run(self, pace_bytes_per_s: float | None = None) -> None:
        """Walks all rounds. What reading or writing raises aborts the group."""
        try:
            self._run(pace_bytes_per_s)
        except BaseException as error:
            self._group.abort(f"rank {self._group.rank}: {error!r}")
            raise

    def _run(self, pace_bytes_per_s: float | None) -> None:
        began = time.monotonic()
        for each in self._part.rounds:
            # A chunk that is passed on must have arrived, not only been asked for.
            while any(hop.chunk in self._arriving for hop in each.sends):
                self._end_oldest()
            sends = [(self._outgoing(hop.chunk), hop.peer) for hop in each.sends]
            self.num_bytes_sent += sum(len(buffer) for buffer, _ in sends)
            if pace_bytes_per_s is not None:
                due = began + self.num_bytes_sent / pace_bytes_per_s
                self._group.wait_aborted(due - time.monotonic())
            receives = [(self._incoming(hop.chunk), hop.peer) for hop in each.receives]
            pending = self._group.start_exchange(sends, receives, _remaining(self._deadline))
            self._under_way.append((each, pending))
            if len(self._under_way) == _WINDOW:
                self._end_oldest()
        while self._under_way:
            self._end_oldest()

    def _outgoing(self, number: int) -> Tensor:
        """Returns a chunk that has arrived, or that this rank is the first to send."""
        chunk = self._part.chunks[number]
        if number not in self._buffers:
            buffer = self._buffers[number] = self._take(chunk)
            self._read(self._pieces(chunk, buffer))
            _clear_padding(self._manifest, chunk, buffer)
            self.sums[number] = chunk_checksum(buffer)
        return self._buffers[number]

    def _incoming(self, number: int) -> Tensor:
        self._arriving.add(number)
        buffer = self._buffers[number] = self._take(self._part.chunks[number])
        return buffer

    def _end_oldest(self) -> None:
        """Waits for the oldest round and uses what it brought."""
        each, pending = self._under_way.popleft()
        pending.wait()
        for hop in each.receives:
            chunk, buffer = self._part.chunks[hop.chunk], self._buffers[hop.chunk]
            self._arriving.discard(hop.chunk)
            self.sums[hop.chunk] = chunk_checksum(buffer)
            self._write(self._pieces(chunk, buffer))
        for hop in each.sends:
            self._left[hop.chunk] -= 1
        for hop in (*each.receives, *each.sends):
            if not self._left[hop.chunk] and hop.chunk in self._buffers:
                self._free.append(self._buffers.pop(hop.chunk))

    def _take(self, chunk: Chunk) -> Tensor:
        """Returns memory for a chunk: a buffer that is free, or a new one of the largest size."""
        if not self._free:
            size = self._part.chunk_bytes
            self._free.append(torch.empty(size, dtype=torch.uint8, device=self._group.device))
        # A view keeps the whole buffer, so it can be given back in its place.
        whole = self._free.pop()
        base = whole if whole._base is None else whole._base
        return base[: chunk.num_bytes]

    def _pieces(self, chunk: Chunk, buffer: Tensor) -> list[tuple[Block, Tensor]]:
        return [
            (block, buffer[offset : offset + self._size(block)])
            for block, offset in zip(chunk.blocks, chunk.offsets, strict=True)
        ]

    def _size(self, block: Block) -> int:
        return block.num_items * ITEM_BYTES[self._manifest.tensors[block.tensor].dtype]


def _clear_padding(manifest: Manifest, chunk: Chunk, buffer: Tensor) -> None:
    """Zeros the bytes between blocks, so that equal weights have equal checksums."""
    ends = (*chunk.offsets[1:], chunk.num_bytes)
    for block, offset, end in zip(chunk.blocks, chunk.offsets, ends, strict=True):
        used = block.num_items * ITEM_BYTES[manifest.tensors[block.tensor].dtype]
        if used % ALIGNMENT:
            buffer[offset + used : end].zero_()


def _remaining(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
