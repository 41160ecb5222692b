"""Where a group's members meet, and how its process group is made for gloo and for nccl."""

import contextlib
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    Store,
    TCPStore,
    Work,
)

from pipelinerl_weights.abort import ABORTED
from pipelinerl_weights.errors import TransferFailed, TransferTimeout

_LOCAL_S = 2.0
"""Longest time to reach the store of this process."""


class Collectives(Protocol):
    """What a transfer needs of c10d's gloo and nccl process groups."""

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Work: ...
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: GatherOptions
    ) -> Work: ...
    def abort(self) -> None: ...
    def name(self) -> str: ...


@dataclass(slots=True)
class Rendezvous:
    """The sender's store server. It lives until `close`."""

    address: str
    port: int
    world_size: int
    store: Store | None

    @classmethod
    def open(cls, address: str, port: int, world_size: int, timeout_s: float) -> "Rendezvous":
        """Listens on `port` of every interface (0: any free one) and returns at once. `address` is
        what the others connect to.

        Raises TransferFailed when the port is taken.
        """
        try:
            store = TCPStore(
                "127.0.0.1",
                port,
                None,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise TransferFailed(
                f"cannot listen on port {port} for the weight-transfer group: {first_line(error)}"
            ) from error
        return cls(address, store.port, world_size, store)

    def call_off(self, epoch: int, reason: str) -> None:
        """Whoever waits for the group of `epoch` to form here, the sender included, fails at once."""
        with contextlib.suppress(TransferTimeout, RuntimeError):  # it has been closed meanwhile
            PrefixStore(scope(epoch), connect_store("127.0.0.1", self.port, _LOCAL_S)).set(
                ABORTED, reason
            )

    def close(self) -> None:
        self.store = None


def scope(epoch: int) -> str:
    """Prefix of the epoch's keys in the store."""
    return f"epoch-{epoch}"


def connect_store(address: str, port: int, timeout_s: float) -> Store:
    """Raises TransferTimeout when nobody listens there before the deadline."""
    try:
        return TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransferTimeout(
            f"the sender does not answer on {address}:{port}: {first_line(error)}"
        ) from error


def make_process_group(
    backend: str, store: Store, *, rank: int, world_size: int, interface: str, timeout_s: float
) -> Collectives:
    """`interface`: local address that gloo binds to. Raises TransferFailed."""
    try:
        return _PROCESS_GROUPS[backend](
            store, rank, world_size, interface, timedelta(seconds=timeout_s)
        )
    except KeyError:
        raise TransferFailed(
            f"unknown backend {backend!r}; known are {', '.join(_PROCESS_GROUPS)}"
        ) from None
    except RuntimeError as error:
        raise TransferFailed(
            f"the {backend} process group cannot be made: {first_line(error)}"
        ) from error


def local_address(address: str, port: int) -> str:
    """This host's address on the way to `address`, so that gloo does not have to guess an interface
    from the host's name.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """c10d's messages carry a stack trace: its first line says what happened."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _gloo(
    store: Store, rank: int, world_size: int, interface: str, timeout: timedelta
) -> Collectives:
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave out its options and collectives
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=interface)]
    return cast(Collectives, gloo(store, rank, world_size, options))


def _nccl(
    store: Store, rank: int, world_size: int, interface: str, timeout: timedelta
) -> Collectives:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return cast(Collectives, nccl(store, rank, world_size, options))


_PROCESS_GROUPS = {"gloo": _gloo, "nccl": _nccl}
