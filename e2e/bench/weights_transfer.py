"""The weights bench's trainer side: the weights of a folder, their group with the generator, and a
raw broadcast beside it.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench import children
from bench.weights_generator import Generator
from bench.weights_mirror import BACKEND, BARRIER, EPOCH, TIMEOUT_S
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.rendezvous import Rendezvous
from pipelinerl_weights.sender import Snapshot, send_snapshot

DTYPE = "float32"


@dataclass(frozen=True)
class Update:
    """One update of the generator. `total_s` is the trainer's view, from the request to its answer."""

    pause_s: float
    transfer_s: float
    apply_s: float
    total_s: float
    num_running: int


def read_snapshot(folder: Path) -> Snapshot:
    """All weights of the folder's safetensors files, packed as the trainer packs them. Raises
    SettingsError without any.
    """
    specs = tuple(TensorSpec(name, DTYPE, tuple(tensor.shape)) for name, tensor in _tensors(folder))
    if not specs:
        raise SettingsError(
            f"--model {folder}: no *.safetensors file in it; give a folder in Hugging Face format"
        )
    manifest = Manifest(specs, WeightTransferSettings().bucket_bytes)
    return Snapshot.pack(manifest, _tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


class Trainer:
    """Rank 0 of the generator's group."""

    def __init__(self, generator: Generator, group: TransferGroup, snapshot: Snapshot) -> None:
        self._generator, self._group, self._snapshot = generator, group, snapshot
        self._version = 0

    @classmethod
    @asynccontextmanager
    async def joined(cls, generator: Generator, snapshot: Snapshot) -> AsyncIterator["Trainer"]:
        """Forms the group of this process and the generator's one worker."""
        rendezvous = Rendezvous.open("127.0.0.1", 0, 2, TIMEOUT_S)
        body = {
            "epoch": EPOCH,
            "master_address": "127.0.0.1",
            "master_port": rendezvous.port,
            "rank_offset": 1,
            "world_size": 2,
        }
        posted = asyncio.create_task(
            generator.post(
                "/init_process_group", {**body, "backend": BACKEND, "timeout_s": TIMEOUT_S}
            )
        )
        group = await asyncio.to_thread(_join, rendezvous)
        with group:
            await posted
            yield cls(generator, group, snapshot)

    async def update(self, mode: str, pace: float | None) -> Update:
        """Sends the weights once more as a new version, at most `pace` bytes per second."""
        self._version += 1
        body: dict[str, Any] = {
            "epoch": EPOCH,
            "version": self._version,
            "manifest": self._snapshot.manifest.to_dict(),
            "mode": mode,
            "kv_cache": "keep",
            "allow_rollback": False,
            "timeout_s": TIMEOUT_S,
        }
        started = time.monotonic()
        sending = asyncio.create_task(
            asyncio.to_thread(
                send_snapshot, self._group, self._snapshot, self._version, TIMEOUT_S, pace
            )
        )
        try:
            answer = await self._generator.post("/request_weight_update", body)
        except BaseException:
            self._group.abort("the generator refused the update")
            await asyncio.gather(sending, return_exceptions=True)
            raise
        total_s = time.monotonic() - started
        await sending
        if answer["checksum"] != self._snapshot.checksum:
            raise Unavailable(
                f"the generator has checksum {answer['checksum']} instead of "
                f"{self._snapshot.checksum}"
            )
        return Update(
            answer["pause_s"],
            answer["transfer_s"],
            answer["apply_s"],
            total_s,
            answer["num_running"],
        )


class Mirror:
    """A process that only receives, in a group of its own that is made like the generator's."""

    def __init__(self, process: Process, group: TransferGroup, snapshot: Snapshot) -> None:
        self._process, self._group, self._snapshot = process, group, snapshot

    @classmethod
    @asynccontextmanager
    async def joined(cls, snapshot: Snapshot) -> AsyncIterator["Mirror"]:
        """Starts the process and forms the group."""
        rendezvous = Rendezvous.open("127.0.0.1", 0, 2, TIMEOUT_S)
        sizes = json.dumps([len(bucket) for bucket in snapshot.buckets])
        argv = [
            sys.executable,
            "-m",
            "bench.weights_mirror",
            str(rendezvous.port),
            sizes,
        ]
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        try:
            with await asyncio.to_thread(_join, rendezvous) as group:
                yield cls(process, group, snapshot)
        finally:
            await children.stop(process)

    async def broadcast(self, pace: float | None) -> float:
        """Seconds to broadcast the buckets' bytes and nothing else."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        async with asyncio.timeout(TIMEOUT_S):
            if not await self._process.stdout.readline():
                raise Unavailable(
                    f"the mirror ended with status {await self._process.wait()}; its error is above"
                )
        return await asyncio.to_thread(_broadcast, self._group, self._snapshot, pace)


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


def _broadcast(group: TransferGroup, snapshot: Snapshot, pace: float | None) -> float:
    start, sent = time.monotonic(), 0
    for bucket in snapshot.buckets:
        sent += len(bucket)
        if pace is not None:
            group.wait_aborted(start + sent / pace - time.monotonic())
        group.broadcast(bucket)
    group.gather_checksums(BARRIER, TIMEOUT_S, torch.device("cpu"))
    return time.monotonic() - start
