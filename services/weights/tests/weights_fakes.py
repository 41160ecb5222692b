"""A strict fake of NCCL behind the binding's Protocol: it does what the library does when members
are slow or lost, and nothing kinder.

- Connecting ends when every rank has called, and never otherwise.
- A kernel spins until its peers' kernels have met it, or until it is aborted by its own rank. The
  death of a peer ends nothing.
- With `reports_errors`, the death of a peer becomes an asynchronous error of the survivors, which
  stays until they abort.
- A call on a communicator that has not launched the last one, and one on a freed handle, are
  mistakes of the caller and fail the test.
- Waiting for the device waits for every kernel, spinning ones included.
"""

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipelinerl_weights.communicator import Communicator, Place
from pipelinerl_weights.nccl import IN_PROGRESS, SUCCESS, DeviceStream, NcclCommunicator
from pipelinerl_weights.store import GroupStore

REMOTE_ERROR = 6


@dataclass(eq=False)
class Kernel:
    """One group of calls on a rank's stream."""

    rank: int
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)
    collective: tuple[str, Tensor] | None = None
    missing: int = 0
    """Pieces whose peer has not come."""
    is_aborted: bool = False

    @property
    def is_spinning(self) -> bool:
        return self.missing > 0 and not self.is_aborted


class FakeStream:
    """A device's stream: kernels run one behind the other."""

    handle = 0

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def record(self) -> "FakeMarker":
        return FakeMarker(list(self.kernels))

    def synchronize(self, limit_s: float) -> bool:
        """Waits for the device as torch.accelerator.synchronize does, but for `limit_s` at most.
        Returns whether it came back.
        """
        deadline = time.monotonic() + limit_s
        while any(kernel.is_spinning for kernel in self.kernels):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


class FakeMarker:
    def __init__(self, before: list[Kernel]) -> None:
        self._before = before

    def query(self) -> bool:
        return not any(kernel.is_spinning for kernel in self._before)


class FakeNetwork:
    """What the ranks of one group share: who has connected, and the pieces on their way."""

    def __init__(self, launch_s: float = 0.0, reports_errors: bool = False) -> None:
        self.lock = threading.RLock()
        self.launch_s = launch_s
        """Time during which a posted group is not launched yet."""
        self.reports_errors = reports_errors
        self.connected: set[int] = set()
        self.world_size = 0
        self.dead: set[int] = set()
        self.sent: dict[tuple[int, int], deque[tuple[Kernel, Tensor]]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], deque[tuple[Kernel, Tensor]]] = defaultdict(deque)
        self.collectives: dict[int, list[tuple[Kernel, Tensor]]] = defaultdict(list)
        self.num_collectives: dict[int, int] = defaultdict(int)
        self.libraries: list[FakeNccl] = []

    def connector(self, store: GroupStore, place: Place, limit_s: float) -> Communicator:
        """A connector for TransferGroup.join."""
        library = FakeNccl(self, place.rank)
        self.libraries.append(library)
        return NcclCommunicator(store, place, limit_s, library, library.stream)

    def kill(self, rank: int) -> None:
        """The process of `rank` is gone: it posts nothing more, and its kernels meet no other."""
        with self.lock:
            self.dead.add(rank)

    def launch(self, kernel: Kernel) -> None:
        with self.lock:
            kernel.missing = len(kernel.sends) + len(kernel.receives)
            for peer, buffer in kernel.sends:
                self.sent[kernel.rank, peer].append((kernel, buffer))
                self._match(kernel.rank, peer)
            for peer, buffer in kernel.receives:
                self.awaited[peer, kernel.rank].append((kernel, buffer))
                self._match(peer, kernel.rank)
            if kernel.collective is not None:
                self._join_collective(kernel, *kernel.collective)

    def _match(self, source: int, to: int) -> None:
        sent, awaited = self.sent[source, to], self.awaited[source, to]
        while sent and awaited:
            (sender, data), (receiver, buffer) = sent.popleft(), awaited.popleft()
            if {source, to} & self.dead or sender.is_aborted or receiver.is_aborted:
                continue
            assert data.numel() == buffer.numel(), "a rank receives another size than was sent"
            buffer.copy_(data)
            sender.missing -= 1
            receiver.missing -= 1

    def _join_collective(self, kernel: Kernel, kind: str, buffer: Tensor) -> None:
        kernel.missing = 1
        number = self.num_collectives[kernel.rank]
        self.num_collectives[kernel.rank] += 1
        present = self.collectives[number]
        present.append((kernel, buffer))
        ranks = {each.rank for each, _ in present}
        if len(present) < self.world_size or ranks & self.dead:
            return
        assert len({each.collective[0] for each, _ in present if each.collective}) == 1
        if kind == "sum":
            total = torch.stack([each for _, each in present]).sum(0)
        else:
            total = next(each for other, each in present if other.rank == 0).clone()
        for each, values in present:
            values.copy_(total)
            each.missing = 0


class FakeNccl:
    """The library as one rank has it."""

    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.stream = FakeStream()
        self.is_freed = False
        self._group: Kernel | None = None
        self._launching: tuple[Kernel, float] | None = None

    def version(self) -> str:
        return "0.0.0 (fake)"

    def unique_id(self) -> bytes:
        return bytes(128)

    def init_rank(self, place: Place, unique_id: bytes) -> tuple[int, int]:
        assert len(unique_id) == 128
        with self.network.lock:
            self.network.world_size = place.world_size
            self.network.connected.add(place.rank)
        return 1, IN_PROGRESS

    def state(self, handle: int) -> int:
        self._check(handle)
        network = self.network
        with network.lock:
            if len(network.connected) < network.world_size:
                return IN_PROGRESS
            if self._launching is not None:
                kernel, ready = self._launching
                if time.monotonic() < ready:
                    return IN_PROGRESS
                self._launching = None
                network.launch(kernel)
            if network.reports_errors and network.dead - {self.rank}:
                return REMOTE_ERROR
            return SUCCESS

    def group_start(self) -> int:
        self._group = self._new_kernel()
        return SUCCESS

    def group_end(self) -> int:
        assert self._group is not None
        kernel, self._group = self._group, None
        return self._post(kernel)

    def send(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int:
        self._check(handle)
        assert self._group is not None, "pieces of one exchange are posted as a group"
        self._group.sends.append((peer, buffer))
        return SUCCESS

    def receive(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int:
        self._check(handle)
        assert self._group is not None, "pieces of one exchange are posted as a group"
        self._group.receives.append((peer, buffer))
        return SUCCESS

    def broadcast(self, handle: int, buffer: Tensor, stream: DeviceStream) -> int:
        return self._collective(handle, "broadcast", buffer)

    def all_reduce(self, handle: int, values: Tensor, stream: DeviceStream) -> int:
        return self._collective(handle, "sum", values)

    def abort(self, handle: int) -> int:
        self._check(handle)
        self.is_freed = True
        with self.network.lock:
            for kernel in self.stream.kernels:
                kernel.is_aborted = True
        return SUCCESS

    def describe(self, handle: int, result: int) -> str:
        return {REMOTE_ERROR: "remote process exited or there was a network error"}[result]

    def _collective(self, handle: int, kind: str, buffer: Tensor) -> int:
        self._check(handle)
        kernel = self._new_kernel()
        kernel.collective = (kind, buffer)
        return self._post(kernel)

    def _new_kernel(self) -> Kernel:
        assert self._launching is None, "called before the last call was launched"
        return Kernel(self.rank)

    def _post(self, kernel: Kernel) -> int:
        # The kernel is on the stream from now on, spinning until its peers come.
        kernel.missing = 1
        self.stream.kernels.append(kernel)
        self._launching = (kernel, time.monotonic() + self.network.launch_s)
        return IN_PROGRESS

    def _check(self, handle: int) -> None:
        assert handle == 1
        assert not self.is_freed, "the handle is used after its abort freed it"
