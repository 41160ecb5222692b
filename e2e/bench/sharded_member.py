"""One rank of the sharded bench, in a network namespace of its own host: `python -m
bench.sharded_member RANK PORT MEGABYTES ROUNDS`.

The trainer's four ranks hold a flat quarter of every weight, as under ZeRO 3; two workers of each
generator need the halves that tensor parallelism gives them. A member prints `ready` once it has
joined the product's group and the baseline's; then, for each line on standard input, it takes part
in an update or a broadcast and prints what it measured as one JSON object.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.rendezvous import Rendezvous
from pipelinerl_weights.slices import Block
from pipelinerl_weights.snapshot import Extent, TensorAssembly, WeightSnapshot
from pipelinerl_weights.transfer import receive, send_snapshot

NUM_SENDERS, NUM_GENERATORS, TENSOR_PARALLEL = 4, 4, 2
WORLD_SIZE = NUM_SENDERS + NUM_GENERATORS * TENSOR_PARALLEL
TIMEOUT_S = 120.0
HIDDEN = 1024
BUCKET_BYTES = 64 << 20


def manifest_of(megabytes: int) -> Manifest:
    """Returns bfloat16 matrices of 2 MiB each; a worker needs rows of one and columns of the next,
    and all of a few small vectors.
    """
    matrices = [TensorSpec(f"w{i}", "bfloat16", (HIDDEN, HIDDEN)) for i in range(megabytes // 2)]
    vectors = [TensorSpec(f"norm{i}", "bfloat16", (HIDDEN,)) for i in range(8)]
    return Manifest((*matrices, *vectors), BUCKET_BYTES)


def share_of(manifest: Manifest, rank: int) -> tuple[Extent, ...]:
    """Returns the rank's flat quarter of every tensor."""
    extents = []
    for index, spec in enumerate(manifest.tensors):
        part = spec.num_bytes // 2 // NUM_SENDERS
        extents.append(Extent(index, rank * part, (rank + 1) * part))
    return tuple(extents)


def needs_of(manifest: Manifest, worker: int) -> tuple[Block, ...]:
    """Returns the halves that a worker of a generator loads."""
    half, shard = HIDDEN // TENSOR_PARALLEL, worker % TENSOR_PARALLEL
    blocks = []
    for index, spec in enumerate(manifest.tensors):
        if len(spec.shape) == 1:
            blocks.append(Block(index, (0,), spec.shape))
        elif index % 2:
            blocks.append(Block(index, (shard * half, 0), (half, HIDDEN)))
        else:
            blocks.append(Block(index, (0, shard * half), (HIDDEN, half)))
    return tuple(blocks)


def weights_of(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yields the same random weights on every rank."""
    generator = torch.Generator().manual_seed(1)
    for spec in manifest.tensors:
        yield spec.name, torch.randn(spec.shape, generator=generator).bfloat16()


class Member:
    """This process's place in both groups."""

    def __init__(self, rank: int, port: int, megabytes: int) -> None:
        self._rank, self._manifest = rank, manifest_of(megabytes)
        self._is_sender = rank < NUM_SENDERS
        self._version = 0
        rendezvous = Rendezvous.open(os.environ["HOST"], port, WORLD_SIZE) if rank == 0 else None
        self._group = TransferGroup.join(
            os.environ["LEADER"],
            port,
            rank=rank,
            world_size=WORLD_SIZE,
            backend="gloo",
            epoch=1,
            timeout_s=TIMEOUT_S,
            store=rendezvous,
            num_senders=NUM_SENDERS,
        )
        self._baseline = self._join_baseline(port + 1)
        self._own: WeightSnapshot | None = None
        if self._is_sender:  # what it trains
            self._own = WeightSnapshot.empty(self._manifest, share_of(self._manifest, rank))
            self._own.fill(weights_of(self._manifest))

    def _join_baseline(self, port: int) -> Any:
        """Returns a process group of rank 0 and all workers."""
        number = max(0, self._rank - NUM_SENDERS + 1)
        if self._is_sender and self._rank:
            return None
        size = WORLD_SIZE - NUM_SENDERS + 1
        store = TCPStore(
            os.environ["LEADER"], port, size, self._rank == 0, timedelta(seconds=TIMEOUT_S)
        )
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=os.environ["HOST"])]
        return gloo(store, number, size, options)

    def update(self) -> dict[str, Any]:
        """Takes part in an update. A sender's extra bytes are those of its peak over what it holds
        for training, its share included.
        """
        self._version += 1
        if self._is_sender:
            return self._send()
        arrived: dict[str, Tensor] = {}
        needs = needs_of(self._manifest, self._rank - NUM_SENDERS)
        sink = TensorAssembly(self._manifest, arrived.update, needs)
        checksum = receive(self._group, self._manifest, self._version, TIMEOUT_S, sink)
        names = {self._manifest.tensors[block.tensor].name: block for block in needs}
        is_right = all(
            torch.equal(_region(arrived[name], names[name]), _region(weight, names[name]))
            for name, weight in weights_of(self._manifest)
        )
        return {"checksum": checksum, "is_right": is_right}

    def _send(self) -> dict[str, Any]:
        own = self._own
        assert own is not None
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _resident()
        snapshot = WeightSnapshot.empty(self._manifest, own.extents)
        snapshot.buffer.copy_(own.buffer)
        report = send_snapshot(self._group, snapshot, self._version, TIMEOUT_S)
        return {
            "seconds": report.seconds,
            "sent": report.num_bytes,
            "extra": _peak() - before,
            "checksum": report.checksum,
        }

    def broadcast(self) -> dict[str, Any]:
        """Sends the whole model through rank 0 to every worker, a bucket at a time."""
        if self._baseline is None:
            return {}
        buffer = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
        left, began = self._manifest.num_bytes, time.monotonic()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        while left > 0:
            self._baseline.broadcast([buffer[: min(left, BUCKET_BYTES)]], options).wait()
            left -= BUCKET_BYTES
        self._baseline.barrier().wait()
        return {"seconds": time.monotonic() - began}


def _region(tensor: Tensor, block: Block) -> Tensor:
    for axis, (start, extent) in enumerate(zip(block.start, block.size, strict=True)):
        tensor = tensor.narrow(axis, start, extent)
    return tensor


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def main() -> None:
    rank, port, megabytes = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    member = Member(rank, port, megabytes)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(member, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
