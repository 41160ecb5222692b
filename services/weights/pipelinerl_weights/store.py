"""The key-value store of a weight-transfer group: a server at trainer rank 0, and its client.

It takes the place of torch's TCPStore, which asks the resolver for the name of every address that
connects: where a query is lost, forming a group stalls for five seconds or fails. It also listens
on every interface, and a call of its client cannot be cancelled.

One frame a request, one a response; the server answers each at once, and clients that wait for a
key ask again. c10d reaches it as a Store of Python's, so gloo meets over it too.
"""

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from pipelinerl_weights.errors import TransferFailed, TransferTimeout

_SET, _GET, _CHECK, _ADD = 1, 2, 3, 4
_REQUEST, _RESPONSE = struct.Struct("!BII"), struct.Struct("!BI")
_FOUND, _MISSING = 1, 0
MAX_KEY_BYTES, MAX_VALUE_BYTES = 1 << 12, 1 << 27
_RECEIVE_BYTES = 1 << 16
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.02
_RETRY_S = 0.05


class StoreServer:
    """Serves the store on one thread until `close`."""

    def __init__(self, address: str, port: int) -> None:
        """Listens on `address`, or on every interface when that is not one of this host's (a
        Service's name). Port 0 takes any free one. Raises OSError.
        """
        try:
            self._listener = socket.create_server((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            self._listener = socket.create_server(("", port))
        host, self.port = self._listener.getsockname()[:2]
        self.host = "127.0.0.1" if host == "0.0.0.0" else host
        """Where this process itself connects to."""
        self._listener.setblocking(False)
        self._values: dict[bytes, bytes] = {}
        self._wake, woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port and ends every client's connection. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        # The next group wants the port at once.
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select():
                if self._closed.is_set():
                    break
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._receive(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr] # sockets only
        self._selector.close()
        self._wake.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _ServedClient(connection)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: "_ServedClient") -> None:
        try:
            data = client.connection.recv(_RECEIVE_BYTES)
            client.received += data
            if data:
                self._answer(client)
                return
        except (OSError, ValueError):
            pass
        self._selector.unregister(client.connection)
        client.connection.close()

    def _answer(self, client: "_ServedClient") -> None:
        """Answers the requests that are complete. Raises ValueError for one that is too large."""
        received = client.received
        while len(received) >= _REQUEST.size:
            verb, key_bytes, value_bytes = _REQUEST.unpack_from(received)
            if key_bytes > MAX_KEY_BYTES or value_bytes > MAX_VALUE_BYTES:
                raise ValueError("a request is too large")
            end = _REQUEST.size + key_bytes + value_bytes
            if len(received) < end:
                return
            middle = _REQUEST.size + key_bytes
            key, value = bytes(received[_REQUEST.size : middle]), bytes(received[middle:end])
            del received[:end]
            found, response = self._do(verb, key, value)
            # Blocking, with a limit: a client reads its response before it asks again.
            client.connection.settimeout(_SEND_LIMIT_S)
            client.connection.sendall(_RESPONSE.pack(found, len(response)) + response)

    def _do(self, verb: int, key: bytes, value: bytes) -> tuple[int, bytes]:
        if verb == _SET:
            self._values[key] = value
            return _FOUND, b""
        if verb == _ADD:
            total = int(self._values.get(key, b"0")) + int(value)
            self._values[key] = str(total).encode()
            return _FOUND, self._values[key]
        if key not in self._values:
            return _MISSING, b""
        return _FOUND, self._values[key] if verb == _GET else b""


_SEND_LIMIT_S = 5.0
"""A client that does not read its response for longer than this loses its connection."""


class _ServedClient:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()


class GroupStore(Store):
    """One connection to the store, for the keys below one prefix. Calls of several threads take
    turns.

    The methods are those of c10d's Store, which gloo calls; it must be kept alive while gloo has
    it. Raises RuntimeError, as c10d's stores do, when the server does not answer in time.
    """

    def __init__(self, connection: "StoreConnection", prefix: str) -> None:
        super().__init__()
        self._connection = connection
        self._prefix = prefix

    @classmethod
    def connect(cls, address: str, port: int, timeout_s: float, prefix: str) -> "GroupStore":
        """Connects. Raises TransferTimeout when no server listens within `timeout_s`, which is also
        the limit of every later call.
        """
        return cls(StoreConnection(address, port, timeout_s), prefix)

    def scoped(self, name: str) -> "GroupStore":
        """Returns the keys below `name`, over the same connection."""
        return GroupStore(self._connection, f"{self._prefix}/{name}")

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits until the key is set."""
        self.wait([key])
        return self._ask(_GET, key)[1]

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set."""
        return all(self._ask(_CHECK, key)[0] for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_ADD, key, str(amount).encode())[1])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set. Raises RuntimeError when they are not within `timeout`."""
        limit_s = self._connection.timeout_s if timeout is None else timeout.total_seconds()
        deadline, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
        # Asked again and again: a response that the server holds back could not be given up.
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the keys {', '.join(keys)} were not set in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def close(self) -> None:
        """Ends the connection, for every user of it: calls under way fail. Idempotent."""
        self._connection.close()

    def _ask(self, verb: int, key: str, value: bytes = b"") -> tuple[int, bytes]:
        return self._connection.ask(verb, f"{self._prefix}/{key}".encode(), value)


class StoreConnection:
    """A client's socket."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.01, deadline - time.monotonic())
            try:
                self._socket = socket.create_connection((address, port), timeout=remaining_s)
                break
            except OSError as error:
                # The sender may still be about to listen.
                if time.monotonic() + _RETRY_S > deadline:
                    raise TransferTimeout(
                        f"the sender does not answer on {address}:{port}: {error}"
                    ) from error
                time.sleep(_RETRY_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        # Shut down first: closing alone does not wake a thread that waits for a response.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def ask(self, verb: int, key: bytes, value: bytes) -> tuple[int, bytes]:
        """Returns whether the key is there, and its value where one was asked for."""
        with self._lock:
            try:
                self._socket.sendall(_REQUEST.pack(verb, len(key), len(value)) + key + value)
                found, size = _RESPONSE.unpack(self._read(_RESPONSE.size))
                return found, self._read(size)
            except OSError as error:
                # The stream may be cut off in the middle: no later response could be matched with
                # its request.
                self._socket.close()
                raise RuntimeError(f"the group's store does not answer: {error}") from error

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the connection was closed")
            at += count
        return bytes(data)


def listen(address: str, port: int) -> StoreServer:
    """Returns a listening store. Raises TransferFailed when the port is taken."""
    try:
        return StoreServer(address, port)
    except OSError as error:
        raise TransferFailed(
            f"cannot listen on port {port} for the weight-transfer group: {error}"
        ) from error
