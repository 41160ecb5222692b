"""The generator worker's side: receiving one version, bucket by bucket."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pipelinerl_weights.checksum import bucket_checksum, fold_checksums
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import TransferGroup
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
    """Receives every bucket of `version` and returns the checksum, which the sender compares with its own.

    `on_bucket(bucket, buffer)` is called in order, while the next bucket already arrives; it must not keep `buffer` (uint8),
    which is used again. `timeout_s` is for the whole call, waiting for the sender included. What `on_bucket` raises
    aborts the group.
    Raises TransferAborted, TransferTimeout or TransferFailed; the group is then aborted for everyone.
    """
    deadline = time.monotonic() + timeout_s
    layout = manifest.buckets()
    largest = max(bucket.num_bytes for bucket in layout)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(2, len(layout)))]
    group.mark_receiving(version)
    sums: list[Tensor] = []
    pending = group.start_broadcast(buffers[0][: layout[0].num_bytes], _remaining(deadline))
    for bucket in layout:
        pending.wait()
        buffer = buffers[bucket.index % 2][: bucket.num_bytes]
        if bucket.index + 1 < len(layout):
            following = layout[bucket.index + 1]
            pending = group.start_broadcast(buffers[following.index % 2][: following.num_bytes], _remaining(deadline))
        try:
            sums.append(bucket_checksum(buffer))
            on_bucket(bucket, buffer)
        except BaseException as error:
            group.abort(f"rank {group.rank}: {error!r}")
            with contextlib.suppress(TransferFailed):
                pending.wait()
            raise
    checksum = fold_checksums(sums, [bucket.num_bytes for bucket in layout])
    group.gather_checksums(checksum, _remaining(deadline), buffers[0].device)
    return checksum


def tensors_of(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a received bucket: views into `buffer`."""
    for slot in bucket.slots:
        yield slot.tensor.name, slot_view(buffer, slot.offset, slot.tensor.dtype, slot.tensor.shape)


def _remaining(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
