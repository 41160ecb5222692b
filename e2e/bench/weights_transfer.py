"""The trainer's side of the weights bench: the weights of a folder, their group with the generator,
and the same bytes sent raw to a mirror.

The mirror is this module as a process: `python -m bench.weights_transfer PORT SIZES`. It joins a
group of two made like the generator's. For each line on standard input it prints `ready` and
receives the bytes, a bucket's at a time, into buffers of its own: no handshake, no plan, no
checksum, no copy.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from bench.processes import Worker
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.generator_api import InitGroupRequest, UpdateRequest
from pipelinerl_common.generator_client import GeneratorClient
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.rendezvous import Rendezvous
from pipelinerl_weights.snapshot import WeightSnapshot
from pipelinerl_weights.transfer import send_snapshot

BACKEND: Literal["gloo"] = "gloo"
TIMEOUT_S, EPOCH = 300.0, 1
DTYPE = "float32"


@dataclass(frozen=True)
class Update:
    """One update of the generator. `total_s` is the trainer's view, from request to response."""

    pause_s: float
    transfer_s: float
    apply_s: float
    total_s: float
    num_running: int


def read_snapshot(folder: Path) -> WeightSnapshot:
    """All weights of the folder's safetensors files, packed as the trainer packs them. Raises
    SettingsError without any.
    """
    specs = tuple(TensorSpec(name, DTYPE, tuple(tensor.shape)) for name, tensor in _tensors(folder))
    if not specs:
        raise SettingsError(
            f"--model {folder}: no *.safetensors file in it; give a folder in Hugging Face format"
        )
    manifest = Manifest(specs, WeightTransferSettings().bucket_bytes)
    return WeightSnapshot.pack(manifest, _tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


class Trainer:
    """Rank 0 of the generator's group."""

    def __init__(
        self, generator: GeneratorClient, group: TransferGroup, snapshot: WeightSnapshot
    ) -> None:
        self._generator, self._group, self._snapshot = generator, group, snapshot
        self._version = 0

    @classmethod
    @asynccontextmanager
    async def joined(
        cls, generator: GeneratorClient, snapshot: WeightSnapshot
    ) -> AsyncIterator["Trainer"]:
        """Forms the group of this process and the generator's one worker."""
        rendezvous = Rendezvous.open("127.0.0.1", 0, 2)
        request = InitGroupRequest(
            epoch=EPOCH,
            master_address="127.0.0.1",
            master_port=rendezvous.port,
            rank_offset=1,
            world_size=2,
            backend=BACKEND,
            timeout_s=TIMEOUT_S,
        )
        posted = asyncio.create_task(generator.init_process_group(request))
        group = await asyncio.to_thread(_join, rendezvous)
        with group:
            await posted
            yield cls(generator, group, snapshot)

    async def update(self, mode: Literal["staged", "inplace"], pace: float | None) -> Update:
        """Sends the weights once more as a new version, at most `pace` bytes per second."""
        self._version += 1
        manifest = self._snapshot.manifest
        request = UpdateRequest(
            epoch=EPOCH,
            version=self._version,
            manifest=manifest.to_json() if self._version == 1 else None,
            manifest_hash=None if self._version == 1 else manifest.hash,
            mode=mode,
            timeout_s=TIMEOUT_S,
        )
        started = time.monotonic()
        sending = asyncio.create_task(
            asyncio.to_thread(
                send_snapshot, self._group, self._snapshot, self._version, TIMEOUT_S, pace
            )
        )
        try:
            answer = await self._generator.update_weights(request)
        except BaseException:
            self._group.abort("the generator refused the update")
            await asyncio.gather(sending, return_exceptions=True)
            raise
        total_s = time.monotonic() - started
        report = await sending
        if answer.checksum != report.checksum:
            raise Unavailable(
                f"the generator has checksum {answer.checksum} instead of {report.checksum}"
            )
        return Update(
            answer.pause_s,
            answer.transfer_s,
            answer.apply_s,
            total_s,
            answer.num_running,
        )


class Mirror:
    """A process that only receives, in a group of its own that is made like the generator's."""

    def __init__(self, worker: Worker, group: TransferGroup, snapshot: WeightSnapshot) -> None:
        self._worker, self._group, self._snapshot = worker, group, snapshot

    @classmethod
    @asynccontextmanager
    async def joined(cls, snapshot: WeightSnapshot) -> AsyncIterator["Mirror"]:
        """Starts the process and forms the group."""
        rendezvous = Rendezvous.open("127.0.0.1", 0, 2)
        sizes = json.dumps([len(part) for part in _parts(snapshot)])
        async with Worker.start(
            "mirror", "bench.weights_transfer", str(rendezvous.port), sizes
        ) as worker:
            with await asyncio.to_thread(_join, rendezvous) as group:
                yield cls(worker, group, snapshot)

    async def send(self, pace: float | None) -> float:
        """Seconds to send the snapshot's bytes and nothing else."""
        self._worker.go()
        await self._worker.line(TIMEOUT_S)
        return await asyncio.to_thread(_send, self._group, self._snapshot, pace)


def _join(rendezvous: Rendezvous) -> TransferGroup:
    return TransferGroup.join(
        rendezvous.address,
        rendezvous.port,
        rank=0,
        world_size=2,
        backend=BACKEND,
        epoch=EPOCH,
        timeout_s=TIMEOUT_S,
        store=rendezvous,
    )


def _parts(snapshot: WeightSnapshot) -> tuple[torch.Tensor, ...]:
    return torch.split(snapshot.buffer, snapshot.manifest.bucket_bytes)


def _send(group: TransferGroup, snapshot: WeightSnapshot, pace: float | None) -> float:
    start, sent = time.monotonic(), 0
    for part in _parts(snapshot):
        sent += len(part)
        if pace is not None:
            group.wait_aborted(start + sent / pace - time.monotonic())
        group.start_exchange([(part, 1)], [], TIMEOUT_S).wait()
    group.end_transfer(TIMEOUT_S)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="weights_transfer",
        description="Receives the raw bytes of `e2e/bench/run weights`.",
    )
    parser.add_argument("port", type=int)
    parser.add_argument("sizes", help="bytes of each part, as a JSON list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in json.loads(args.sizes)]
    with TransferGroup.join(
        "127.0.0.1",
        args.port,
        rank=1,
        world_size=2,
        backend=BACKEND,
        epoch=EPOCH,
        timeout_s=TIMEOUT_S,
    ) as group:
        for _ in sys.stdin:
            print("ready", flush=True)
            for buffer in buffers:
                group.start_exchange([], [(buffer, 0)], TIMEOUT_S).wait()
            group.end_transfer(TIMEOUT_S)


if __name__ == "__main__":
    main()
