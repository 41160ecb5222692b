"""The generator worker's side: receiving one version, bucket by bucket."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pipelinerl_weights.checksum import bucket_checksum, fold_checksums
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import Pending, TransferGroup
from pipelinerl_weights.manifest import Bucket, Manifest
from pipelinerl_weights.sender import slot_view


def receive(
    group: TransferGroup,
    manifest: Manifest,
    version: int,
    timeout_s: float,
    on_bucket: Callable[[Bucket, Tensor], None],
    *,
    device: torch.device | str = "cpu",
) -> str:
    """Receives every bucket of `version` and returns the checksum, which the sender compares with
    its own.

    `on_bucket(bucket, buffer)` is called in order, while the next bucket already arrives. The buffer (uint8) is its to keep:
    every bucket has a fresh one, so two of them exist besides what is kept. `timeout_s` is for the
    whole call, waiting for the sender included. What `on_bucket` raises aborts the group. Raises
    TransferAborted, TransferTimeout or TransferFailed; the group is then aborted for everyone.
    """
    deadline = time.monotonic() + timeout_s
    layout = manifest.buckets()

    def start(bucket: Bucket) -> tuple[Tensor, Pending]:
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        return buffer, group.start_broadcast(buffer, _remaining(deadline))

    group.mark_receiving(version)
    sums: list[Tensor] = []
    buffer, pending = start(layout[0])
    for bucket in layout:
        pending.wait()
        arrived = buffer
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
    group.gather_checksums(checksum, _remaining(deadline), torch.device(device))
    return checksum


def tensors_of(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a received bucket: views into `buffer`."""
    for slot in bucket.slots:
        yield slot.tensor.name, slot_view(buffer, slot.offset, slot.tensor.dtype, slot.tensor.shape)


def _remaining(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
