"""The watchdog of the run's process groups, from the side of the process that it watches."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

WATCHDOG = str(Path(__file__).with_name("watchdog.py"))
END_S = 10.0


class Guard:
    """While this process lives, groups are added and taken back; when it is gone, those that are
    left are ended.
    """

    def __init__(self) -> None:
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Guard":
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with suppress(BrokenPipeError):
                self._watchdog.stdin.close()
            self._watchdog.wait(END_S)

    def add(self, group: int) -> None:
        self._send(group)

    def take_back(self, group: int) -> None:
        """Everything in the group has ended: its number may soon belong to others."""
        self._send(-group)

    def _send(self, number: int) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        with suppress(BrokenPipeError):  # somebody killed the watchdog; the tethers are still there
            self._watchdog.stdin.write(b"%d\n" % number)
            self._watchdog.stdin.flush()


TETHER = str(Path(__file__).with_name("tether.py"))


def tethered(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` as a command that ends with this process. Start it from the main thread: Linux ties it
    to the starting thread.
    """
    return (sys.executable, "-I", "-S", TETHER, str(os.getpid()), *argv)
