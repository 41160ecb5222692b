"""NCCL without torch's ProcessGroupNCCL: a communicator of our own over a binding of the thirteen
functions that a transfer needs.

ProcessGroupNCCL with its error handling switched off was the alternative. It still connects inside
the first operation, keeps threads of its own, and reads its behaviour from environment variables
that the trainer's own process groups share; vLLM's PyNcclCommunicator blocks in its constructor,
and a trainer has no vLLM.

The communicator is non-blocking (`blocking = 0`): every call returns at once, and
`ncclCommGetAsyncError` says when the library is ready for the next one. That an operation's kernel
has ended is seen by an event behind it on the group's stream; nothing ever synchronises the stream
or the device, which would wait for a kernel that spins because its peer is gone.
"""

import ctypes
import importlib.util
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelinerl_common.errors import SettingsError
from pipelinerl_weights.communicator import Operation, Piece, Place
from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.store import GroupStore

SUCCESS, IN_PROGRESS = 0, 7
_UINT8, _INT64, _SUM = 1, 4, 0
_UNDEFINED = -(1 << 31)
_CONFIG_VERSION = 21700
"""The release whose configuration `_Config` is; every later library reads it."""
_ID_KEY = "nccl-id"


class Marker(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Returns whether the work before it has ended."""
        ...


class DeviceStream(Protocol):
    """The stream of one device that a communicator's kernels run on."""

    handle: int

    def record(self) -> Marker:
        """Marks the end of the work that is queued now."""
        ...


class NcclLibrary(Protocol):
    """The functions of NCCL that are used, with tensors in place of pointers. Calls return a
    ncclResult_t where NCCL's do.
    """

    def version(self) -> str: ...
    def unique_id(self) -> bytes: ...
    def init_rank(self, place: Place, unique_id: bytes) -> tuple[int, int]:
        """Starts to connect. Returns the communicator's handle and the result."""
        ...

    def state(self, handle: int) -> int: ...
    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def send(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int: ...
    def receive(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int: ...
    def broadcast(self, handle: int, buffer: Tensor, stream: DeviceStream) -> int:
        """From rank 0, in place."""
        ...

    def all_reduce(self, handle: int, values: Tensor, stream: DeviceStream) -> int: ...
    def abort(self, handle: int) -> int: ...
    def describe(self, handle: int, result: int) -> str:
        """The text of an error."""
        ...


class _NcclOperation:
    """One group of NCCL calls: posted when the library is ready for it, done when the marker
    behind its kernels is reached.
    """

    def __init__(self, communicator: "NcclCommunicator", post: Callable[[int], int]) -> None:
        self._communicator = communicator
        self.post = post
        self.marker: Marker | None = None

    def is_done(self) -> bool:
        return self._communicator.advance(self)


class NcclCommunicator:
    """Connections over NCCL, for weights in the memory of one device."""

    def __init__(
        self,
        store: GroupStore,
        place: Place,
        limit_s: float,
        library: NcclLibrary | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        del limit_s  # nothing here waits
        self._library = load_library() if library is None else library
        self._stream = transfer_stream(place.device) if stream is None else stream
        self._store, self._place = store, place
        self.transport = f"NCCL {self._library.version()} on {_networks()}"
        # A handle must not be used while or after it is aborted: NCCL frees it.
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._aborted = False
        self._unposted: deque[_NcclOperation] = deque()
        self._posting: _NcclOperation | None = None
        """Posted, but its kernels may not be launched yet."""
        if place.rank == 0:
            self._store.set(_ID_KEY, self._library.unique_id().hex())

    def is_connected(self) -> bool:
        with self._lock:
            self._raise_if_aborted()
            if self._handle is None:
                if not self._store.check([_ID_KEY]):
                    return False
                unique_id = bytes.fromhex(self._store.get(_ID_KEY).decode())
                self._handle, result = self._library.init_rank(self._place, unique_id)
                self._raise_if_failed(result)
            return self._is_ready()

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Operation:
        def post(handle: int) -> int:
            self._raise_if_failed(self._library.group_start())
            for buffer, peer in sends:
                self._raise_if_failed(self._library.send(handle, buffer, peer, self._stream))
            for buffer, peer in receives:
                self._raise_if_failed(self._library.receive(handle, buffer, peer, self._stream))
            return self._library.group_end()

        return self._start(post)

    def broadcast(self, buffer: Tensor) -> Operation:
        return self._start(lambda handle: self._library.broadcast(handle, buffer, self._stream))

    def all_reduce(self, values: Tensor) -> Operation:
        return self._start(lambda handle: self._library.all_reduce(handle, values, self._stream))

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            handle, self._handle = self._handle, None
        if handle is not None:
            # On a thread of its own: the library may take its time, and callers are event loops
            # and threads that decode.
            threading.Thread(
                target=self._library.abort, args=(handle,), name="weights-nccl-abort", daemon=True
            ).start()

    def destroy(self) -> None:
        # Aborting frees the communicator as well; destroying it would wait for pending kernels.
        self.abort()

    def advance(self, operation: _NcclOperation) -> bool:
        """Posts what the library is ready for, and returns whether `operation` has ended."""
        with self._lock:
            self._raise_if_aborted()
            # Before the library's state: what has ended has ended, also when a peer died since.
            if operation.marker is None or not operation.marker.query():
                self._post_ready()
            return operation.marker is not None and operation.marker.query()

    def _start(self, post: Callable[[int], int]) -> Operation:
        operation = _NcclOperation(self, post)
        with self._lock:
            self._raise_if_aborted()
            self._unposted.append(operation)
            self._post_ready()
        return operation

    def _post_ready(self) -> None:
        # A non-blocking communicator takes the next call only once it has launched the last one.
        while self._is_ready():
            if self._posting is not None:
                self._posting.marker = self._stream.record()
                self._posting = None
            if not self._unposted:
                return
            self._posting = self._unposted.popleft()
            assert self._handle is not None
            self._raise_if_failed(self._posting.post(self._handle))

    def _is_ready(self) -> bool:
        assert self._handle is not None, "the communicator is used before it is connected"
        result = self._library.state(self._handle)
        self._raise_if_failed(result)
        return result == SUCCESS

    def _raise_if_aborted(self) -> None:
        if self._aborted:
            raise TransferFailed("NCCL: the communicator is aborted")

    def _raise_if_failed(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise TransferFailed(f"NCCL: {self._library.describe(self._handle or 0, result)}")


def _networks() -> str:
    """Returns the host's RDMA devices, which NCCL prefers, or says that it has none."""
    return ", ".join(rdma_devices()) or "sockets: the host has no RDMA device"


def rdma_devices() -> list[str]:
    """Returns the names of the host's RDMA devices, which NCCL prefers to sockets."""
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


class CudaStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        # The highest priority: an exchange that waits behind training's kernels keeps receivers'
        # kernels spinning.
        self.stream = cuda.Stream(device, priority=-1)
        self.handle: int = self.stream.cuda_stream

    def record(self) -> Marker:
        marker: Marker = self.stream.record_event()
        return marker


@cache
def transfer_stream(device: torch.device) -> CudaStream:
    """Returns the process's one stream for transfers. Only one, because the caching allocator keeps
    a stream's blocks for that stream: with a new one for every transfer memory would be stranded.
    """
    return CudaStream(device)


@contextmanager
def on_transfer_stream(device: torch.device) -> Iterator[None]:
    """Runs the block on the process's stream for transfers, so that it queues behind neither
    training nor decoding; ends when the stream's work is done. Does nothing on a CPU.

    It is the communicator's stream too: a buffer that is used again is written only after its last
    use, without an event between the two.
    """
    if device.type != "cuda":
        yield
        return
    cuda: Any = torch.cuda
    cuda.set_device(device)  # a new thread starts on device 0
    stream = transfer_stream(device).stream
    with cuda.stream(stream):
        yield
        stream.synchronize()


def cuda_fault() -> str | None:
    """Returns why CUDA cannot be used, in torch's own words, or None when it can."""
    cuda: Any = torch.cuda
    if cuda.is_available():
        return None
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "no device is visible"


def require_cuda(setting: str) -> None:
    """Raises SettingsError, with torch's own reason, when `setting` gives this process a GPU and
    CUDA cannot be used: silently computing on the CPU would look like a very slow run.
    """
    reason = cuda_fault()
    if reason is None:
        return
    raise SettingsError(
        f"{setting} gives this process a GPU, but CUDA cannot be used: {reason} (torch "
        f"{torch.__version__}, built for CUDA {torch.version.cuda}). Check nvidia-smi on this "
        "machine and the driver that this CUDA release needs, or run on CPUs with "
        "actors.gpusPerReplica=0 and weightTransfer.backend=gloo"
    )


# The binding


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t of release 2.17."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class BoundLibrary:
    """NCCL's shared library, called through ctypes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p

    def version(self) -> str:
        number = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        unique_id = _UniqueId()
        result = self._library.ncclGetUniqueId(ctypes.byref(unique_id))
        if result != SUCCESS:
            raise TransferFailed(f"NCCL: {self.describe(0, result)}")
        return bytes(unique_id)

    def init_rank(self, place: Place, unique_id: bytes) -> tuple[int, int]:
        cuda: Any = torch.cuda
        cuda.set_device(place.device)  # a new thread starts on device 0
        handle = ctypes.c_void_p()
        config = _Config(
            ctypes.sizeof(_Config),
            0xCAFEBEEF,
            _CONFIG_VERSION,
            0,
            _UNDEFINED,
            _UNDEFINED,
            _UNDEFINED,
            None,
            _UNDEFINED,
        )
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(handle),
            ctypes.c_int(place.world_size),
            _UniqueId.from_buffer_copy(unique_id),
            ctypes.c_int(place.rank),
            ctypes.byref(config),
        )
        return handle.value or 0, result

    def state(self, handle: int) -> int:
        state = ctypes.c_int()
        result = self._library.ncclCommGetAsyncError(ctypes.c_void_p(handle), ctypes.byref(state))
        return int(result) or state.value

    def group_start(self) -> int:
        return int(self._library.ncclGroupStart())

    def group_end(self) -> int:
        return int(self._library.ncclGroupEnd())

    def send(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int:
        return int(self._library.ncclSend(*_pointer(buffer), peer, *_on(handle, stream)))

    def receive(self, handle: int, buffer: Tensor, peer: int, stream: DeviceStream) -> int:
        return int(self._library.ncclRecv(*_pointer(buffer), peer, *_on(handle, stream)))

    def broadcast(self, handle: int, buffer: Tensor, stream: DeviceStream) -> int:
        pointer, count, kind = _pointer(buffer)
        arguments = (pointer, pointer, count, kind, 0, *_on(handle, stream))
        return int(self._library.ncclBroadcast(*arguments))

    def all_reduce(self, handle: int, values: Tensor, stream: DeviceStream) -> int:
        pointer = ctypes.c_void_p(values.data_ptr())
        count = ctypes.c_size_t(values.numel())
        arguments = (pointer, pointer, count, _INT64, _SUM, *_on(handle, stream))
        return int(self._library.ncclAllReduce(*arguments))

    def abort(self, handle: int) -> int:
        return int(self._library.ncclCommAbort(ctypes.c_void_p(handle)))

    def describe(self, handle: int, result: int) -> str:
        text = self._library.ncclGetErrorString(ctypes.c_int(result)) or b"unknown error"
        detail = self._library.ncclGetLastError(ctypes.c_void_p(handle)) or b""
        return f"{text.decode()} {detail.decode(errors='replace')}".strip()


def _pointer(buffer: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, int]:
    return ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()), _UINT8


def _on(handle: int, stream: DeviceStream) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    return ctypes.c_void_p(handle), ctypes.c_void_p(stream.handle)


@cache
def load_library() -> BoundLibrary:
    """Returns the NCCL that torch uses. Raises TransferFailed that says where it was looked for."""
    if not torch.cuda.is_available():
        raise TransferFailed(
            "weightTransfer.backend=nccl needs a CUDA device and this process has none; set "
            "weightTransfer.backend=gloo"
        )
    package = importlib.util.find_spec("nvidia.nccl")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    names = [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders] + ["libnccl.so.2"]
    for name in names:
        try:
            return BoundLibrary(ctypes.CDLL(name))
        except OSError:
            continue
    raise TransferFailed(f"NCCL is not installed: none of {', '.join(names)} can be loaded")
