"""`python -m pipelinerl_weights.gpu_check`: what this host or container has for GPU collectives,
and one member of a group that tries them. `pipelinerl doctor gpu` runs it, in every pod of a job or
on one machine, with the communicator that weights are sent over.

Every response is one JSON object a line on standard output; the last is the result, or has the
field `error`. Rank 0 first says where the others find it.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipelinerl_weights.communicator import Communicator, Operation, Place, connect, first_line
from pipelinerl_weights.device_watch import device_fault
from pipelinerl_weights.errors import TransferFailed, TransferTimeout
from pipelinerl_weights.group import CONNECTORS
from pipelinerl_weights.nccl import cuda_fault, load_library, on_transfer_stream, rdma_devices
from pipelinerl_weights.rendezvous import Rendezvous, local_address, scope
from pipelinerl_weights.store import GroupStore

ROUNDS = 3
_POLL_S = 0.0005
_MEET_POLL_S = 0.01
_SMI_S = 10.0
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a process here would compute and communicate with."""

    host: str
    python: str
    torch: str
    cuda: str | None
    """CUDA release that torch is built for; None for a build for CPUs."""
    cuda_fault: str | None
    """Why CUDA cannot be used, in torch's own words; None when it can."""
    device_fault: str | None
    """Why a device does not answer the driver; None while all do."""
    driver: str | None
    nccl: str | None
    devices: list[str]
    """Example: "NVIDIA H100 80GB HBM3, 85 GB"."""
    verbs: bool
    """Whether libibverbs, without which NCCL uses sockets, can be loaded."""
    rdma: list[str]


def facts() -> GpuFacts:
    """Returns what is here; nothing that is missing raises."""
    fault = cuda_fault()
    cuda: Any = torch.cuda
    devices = []
    nccl = None
    if fault is None:
        for index in range(cuda.device_count()):
            properties = cuda.get_device_properties(index)
            devices.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
        try:
            nccl = load_library().version()
        except TransferFailed:
            nccl = None
    return GpuFacts(
        socket.gethostname(),
        platform.python_version(),
        torch.__version__,
        torch.version.cuda,
        fault,
        device_fault(_SMI_S),
        _driver(),
        nccl,
        devices,
        _loads("libibverbs.so.1"),
        rdma_devices(),
    )


def _driver() -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None without one."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            # With a limit: a driver that has lost a device may never answer.
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=_SMI_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        text = asked.stdout if asked.returncode == 0 else ""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# One member of the group


class NcclLog:
    """NCCL's own messages, from which the transport that it chose is read: no call returns it.

    In memory, since a container's file system may be read-only. Made before the library reads its
    environment, which it does once.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("nccl-log")
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET,GRAPH"
        os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{self._descriptor}"

    def transport(self) -> str:
        """Returns the transports in use. Example: "NET/IB, P2P"."""
        size = os.fstat(self._descriptor).st_size
        return transports(os.pread(self._descriptor, size, 0).decode(errors="replace"))


def transports(log: str) -> str:
    """Returns the transports that NCCL's log names for its channels, or else the network that it
    chose; "" when it names none.
    """
    ways = re.findall(r"\bvia ([A-Za-z0-9_]+)(?:/([A-Za-z0-9_]+))?", log)
    names = {f"{way}/{kind}" if way in ("NET", "COLL") else way for way, kind in ways}
    if not names:
        names = {f"NET/{name}" for name in re.findall(r"Using network (\w+)", log)}
    return ", ".join(sorted(names))


@dataclass(frozen=True, slots=True)
class MemberResult:
    """What one member measured."""

    rank: int
    connect_seconds: float
    """The time of a first sum over all members, from when all had come."""
    all_reduce_seconds: float
    """The time of the fastest of three rounds."""
    broadcast_seconds: float
    num_bytes: int
    transport: str


class _Member:
    """This process in the group: every wait ends at the deadline."""

    def __init__(self, store: GroupStore, place: Place, deadline: float) -> None:
        self._store, self._place, self._deadline = store, place, deadline

    def run(self, backend: str, num_bytes: int) -> MemberResult:
        """Connects and measures. Raises TransferFailed, with every check that failed."""
        log = NcclLog() if backend == "nccl" else None
        self.meet("joined")
        place = self._place
        with on_transfer_stream(place.device):
            communicator, connect_s = connect(
                CONNECTORS[backend], self._store, place, self._deadline, lambda: None
            )
            try:
                times = self._measure(communicator, num_bytes)
                # Leaving ends what others still have under way.
                self.meet("measured")
            finally:
                communicator.destroy()
        chosen = log.transport() if log else ""
        return MemberResult(
            place.rank, connect_s, *times, num_bytes, chosen or communicator.transport
        )

    def _measure(self, communicator: Communicator, num_bytes: int) -> tuple[float, float]:
        place, count = self._place, max(1, num_bytes // 8)
        values = torch.empty(count, dtype=torch.int64, device=place.device)
        expected = place.world_size * (place.world_size + 1) // 2

        def add() -> Operation:
            return communicator.all_reduce(values.fill_(place.rank + 1))

        def spread() -> Operation:
            values.fill_(expected if place.rank == 0 else 0)
            return communicator.broadcast(values.view(torch.uint8))

        measured = []
        for name, start in (("all-reduce", add), ("broadcast", spread)):
            measured.append(min(self._time(f"{name}-{k}", start) for k in range(ROUNDS)))
            if bool((values != expected).any()):
                raise TransferFailed(f"the {name} over {place.world_size} members gave wrong sums")
        return measured[0], measured[1]

    def _time(self, name: str, start: Callable[[], Operation]) -> float:
        # Together: a member's time would otherwise count how late the others come.
        self.meet(name)
        began = time.monotonic()
        operation = start()
        while not operation.is_done():
            if time.monotonic() > self._deadline:
                raise TransferTimeout(f"{name} did not end in time")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def meet(self, name: str) -> None:
        """Waits for all members. Raises TransferTimeout that names those that did not come."""
        self.leave(name)
        missing = list(range(self._place.world_size))
        while missing := [k for k in missing if not self._store.check([f"{name}/{k}"])]:
            if time.monotonic() > self._deadline:
                ranks = ", ".join(map(str, missing))
                raise TransferTimeout(f"members {ranks} did not come to {name} in time")
            time.sleep(_MEET_POLL_S)

    def leave(self, name: str) -> None:
        """Says that this member has come, without waiting."""
        self._store.set(f"{name}/{self._place.rank}", "1")


def member(args: argparse.Namespace) -> MemberResult:
    """Takes part in the group until all members have measured."""
    deadline = time.monotonic() + args.timeout
    address = args.address or os.environ.get("PRL_POD_IP") or "127.0.0.1"
    rendezvous = Rendezvous.open(address, 0, args.world_size) if args.rank == 0 else None
    host, port = (rendezvous.server.host, rendezvous.port) if rendezvous else (address, args.port)
    if rendezvous:
        _say({"address": address, "port": port})
    store = GroupStore.connect(host, port, args.timeout, scope(0))
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", args.device)
    place = Place(args.rank, args.world_size, local_address(address, port), device)
    joined = _Member(store, place, deadline)
    try:
        result = joined.run(args.backend, args.bytes)
        # The store is rank 0's: it stays until all have left.
        (joined.meet if rendezvous else joined.leave)("left")
        return result
    finally:
        store.close()
        if rendezvous:
            rendezvous.close()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl_weights.gpu_check")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("facts", help="print what is here")
    joins = verbs.add_parser("member", help="take part in a group and measure")
    joins.add_argument("--rank", type=int, required=True)
    joins.add_argument("--world-size", type=int, required=True)
    joins.add_argument("--backend", choices=sorted(CONNECTORS), required=True)
    joins.add_argument("--address", help="of rank 0; on rank 0 default PRL_POD_IP or 127.0.0.1")
    joins.add_argument("--port", type=int, default=0, help="that rank 0 has printed")
    joins.add_argument("--device", type=int, default=0)
    joins.add_argument("--bytes", type=int, default=1 << 26)
    joins.add_argument("--timeout", type=float, default=60.0)
    args = parser.parse_args()
    try:
        result: GpuFacts | MemberResult = facts() if args.verb == "facts" else member(args)
    except (TransferFailed, OSError, RuntimeError) as error:
        _say({"error": first_line(error)})
        return 1
    _say(asdict(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
