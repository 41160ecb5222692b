"""One transfer: the trainer packs a version into a snapshot and sends it, a generator's worker
receives it bucket by bucket.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_common.errors import PermanentError
from pipelinerl_common.text import counted, nouns
from pipelinerl_weights.checksum import bucket_checksum, fold_checksums
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import Pending, TransferGroup
from pipelinerl_weights.manifest import Bucket, Manifest
from pipelinerl_weights.nccl import on_transfer_stream


@dataclass(frozen=True, slots=True)
class SendReport:
    """The result of a transfer whose checksum every receiver confirmed."""

    num_bytes: int
    """Bytes sent to each receiver, padding included."""
    seconds: float
    """Seconds from the first bucket to the last receiver's confirmation."""
    checksum: str


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """The weights of one version, copied into buckets so that training can continue while they are
    sent.

    They are in host memory, whatever sends them: on the device, the snapshot that is offered and
    the next one would take twice the model from the trainer's first rank.
    """

    manifest: Manifest
    buckets: tuple[Tensor, ...]
    """1-d uint8 in host memory, one per bucket of the manifest."""

    @classmethod
    def pack(cls, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> "WeightSnapshot":
        """Copies `tensors` (any order, cast to the manifest's dtypes) into buckets.

        An iterator that gathers one tensor at a time keeps only that one alive beside the buckets.
        Raises PermanentError that lists tensors which are missing, unknown, given twice, or of the
        wrong shape.
        """
        layout = manifest.buckets()
        buckets = tuple(map(_empty_buffer, layout))
        targets = {
            slot.tensor.name: slot_view(
                buckets[bucket.index], slot.offset, slot.tensor.dtype, slot.tensor.shape
            )
            for bucket in layout
            for slot in bucket.slots
        }
        with torch.no_grad():
            for name, tensor in tensors:
                target = targets.pop(name, None)
                if target is None:
                    raise PermanentError(f"{name} is not in the manifest, or was given twice")
                if target.shape != tensor.shape:
                    raise PermanentError(
                        f"{name} has shape {tuple(tensor.shape)}, the manifest says "
                        f"{tuple(target.shape)}"
                    )
                target.copy_(tensor)
        if targets:
            missing = counted(len(targets), "tensor")
            raise PermanentError(
                f"{missing} of the manifest not given: {', '.join(list(targets)[:5])}"
            )
        return cls(manifest, buckets)

    @property
    def checksum(self) -> str:
        """The checksum that every receiver reports; computed each time."""
        return fold_checksums(list(map(bucket_checksum, self.buckets)), self._sizes)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [len(bucket) for bucket in self.buckets]


def _empty_buffer(bucket: Bucket) -> Tensor:
    """Returns memory for a bucket, with zeros between the tensors: padding is part of the
    checksum. Where there is a device the memory is pinned, which torch keeps for the next snapshot.
    """
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    ends = [slot.offset for slot in bucket.slots[1:]] + [bucket.num_bytes]
    for slot, end in zip(bucket.slots, ends, strict=True):
        buffer[slot.offset + slot.tensor.num_bytes : end].zero_()
    return buffer


def send_snapshot(
    group: TransferGroup,
    snapshot: WeightSnapshot,
    version: int,
    timeout_s: float,
    pace_bytes_per_s: float | None = None,
) -> SendReport:
    """Waits until every receiver is ready, broadcasts the buckets, and collects the receivers'
    checksums. Weights that are sent from a device go through one buffer there.

    `pace_bytes_per_s` slows the transfer to that rate, as a slower link would. `timeout_s` is for
    the whole call. Raises TransferAborted, TransferTimeout or TransferFailed; the group is then
    aborted for every member.
    """
    deadline = time.monotonic() + timeout_s
    group.wait_all_receiving(version, timeout_s)
    start, sent = time.monotonic(), 0
    sums: list[Tensor] = []
    with on_transfer_stream(group.device):
        for bucket in _on_device(snapshot.buckets, group.device):
            sent += len(bucket)
            if pace_bytes_per_s is not None:
                group.wait_aborted(start + sent / pace_bytes_per_s - time.monotonic())
            # Beside the broadcast: the bytes are read only.
            pending = group.start_broadcast(bucket, _remaining(deadline))
            sums.append(bucket_checksum(bucket))
            pending.wait()
        own = fold_checksums(sums, [len(bucket) for bucket in snapshot.buckets])
        checksums = group.gather_checksums(own, _remaining(deadline))
    wrong = [rank for rank, checksum in enumerate(checksums) if checksum != own]
    if wrong:
        ranks = f"{nouns(len(wrong), 'rank')} {', '.join(map(str, wrong))}"
        error = TransferFailed(f"{ranks} received other bytes than were sent (version {version})")
        group.abort(str(error))
        raise error
    return SendReport(sent, time.monotonic() - start, own)


def _on_device(buckets: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields the buckets where they are sent from: themselves, or one after the other in a buffer
    of `device`, which the next one overwrites.
    """
    if device.type == "cpu":
        yield from buckets
        return
    buffer = torch.empty(max(map(len, buckets)), dtype=torch.uint8, device=device)
    for bucket in buckets:
        # In the order of the stream: behind the broadcast that read the buffer before.
        yield buffer[: len(bucket)].copy_(bucket, non_blocking=True)


def slot_view(bucket: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor at `offset` bytes of a packed bucket, without a copy."""
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    return bucket[offset : offset + count * kind.itemsize].view(kind).view(shape)


def _remaining(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def receive(
    group: TransferGroup,
    manifest: Manifest,
    version: int,
    timeout_s: float,
    on_bucket: Callable[[Bucket, Tensor], None],
) -> str:
    """Receives every bucket of `version` and returns the checksum, which the sender compares with
    its own.

    `on_bucket(bucket, buffer)` is called in order, while the next bucket already arrives. It may
    keep the buffer (uint8): every bucket has a fresh one, so two of them exist besides what is
    kept. `timeout_s` is for the whole call, waiting for the sender included. What `on_bucket`
    raises aborts the group. Raises TransferAborted, TransferTimeout or TransferFailed; the group is
    then aborted for every member.
    """
    deadline = time.monotonic() + timeout_s
    layout = manifest.buckets()

    def start(bucket: Bucket) -> tuple[Tensor, Pending]:
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=group.device)
        return buffer, group.start_broadcast(buffer, _remaining(deadline))

    group.mark_receiving(version)
    sums: list[Tensor] = []
    buffer, pending = start(layout[0])
    for bucket in layout:
        pending.wait()
        arrived = buffer
        # The next broadcast starts before this bucket is used: network and copies overlap.
        if bucket.index + 1 < len(layout):
            buffer, pending = start(layout[bucket.index + 1])
        try:
            sums.append(bucket_checksum(arrived))
            on_bucket(bucket, arrived)
        except BaseException as error:
            group.abort(f"rank {group.rank}: {error!r}")
            with contextlib.suppress(TransferFailed):
                pending.wait()
            raise
    checksum = fold_checksums(sums, [bucket.num_bytes for bucket in layout])
    group.gather_checksums(checksum, _remaining(deadline))
    return checksum


def tensors_of(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a received bucket, as views into `buffer`."""
    for slot in bucket.slots:
        yield slot.tensor.name, slot_view(buffer, slot.offset, slot.tensor.dtype, slot.tensor.shape)
