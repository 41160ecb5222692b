"""Free ports for the run's processes, held for as long as the run.

A port that was found free and released again may be gone before its process binds it, above all to
an outgoing connection. So each port stays bound here, by a socket that never listens: with
SO_REUSEADDR on both sides Linux lets the process listen on the port too, while it gives the port to
nobody who asks for any free one.
"""

import socket
from types import TracebackType

from pipelinerl_common.errors import SettingsError

LOOPBACK = "127.0.0.1"


class Ports:
    """Reserved loopback ports; leaving the context releases them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "Ports":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def reserve(self) -> int:
        """A port that nobody else on this machine has or gets."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        self._sockets.append(held)
        return int(held.getsockname()[1])

    def address(self) -> str:
        """A reserved "host:port"."""
        return f"{LOOPBACK}:{self.reserve()}"


def check_port_is_free(field: str, port: int) -> None:
    """Raises SettingsError when another process listens on the port that the job file asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError as error:
            raise SettingsError(
                f"{field}={port}: the port is occupied ({error.strerror}); end the process that "
                "has it, "
                "choose another port, or 0 for any free one"
            ) from error
