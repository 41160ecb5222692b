"""No process outlives the run: a tether ends a process with the one that started it, and the
watchdog ends the groups of processes that a killed `pipelinerl up` leaves behind.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TETHER, WATCHDOG = (str(Path(__file__).with_name(f"{name}.py")) for name in ("tether", "watchdog"))
END_S = 10.0


def tethered(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` as a command that ends with this process. Start it from the main thread: Linux ties it
    to the starting thread.
    """
    return (sys.executable, "-I", "-S", TETHER, str(os.getpid()), *argv)


class Guard:
    """Starts the watchdog and reports the process groups that exist to it: it ends those that are
    left when this process is gone.
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

    def __exit__(self, *exception: object) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with suppress(BrokenPipeError):
                self._watchdog.stdin.close()
            self._watchdog.wait(END_S)

    def add(self, group: int) -> None:
        self._send(group)

    def remove(self, group: int) -> None:
        """Everything in the group has ended: its number may soon belong to others."""
        self._send(-group)

    def _send(self, number: int) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        with suppress(BrokenPipeError):  # the watchdog was killed; the tethers still work
            self._watchdog.stdin.write(b"%d\n" % number)
            self._watchdog.stdin.flush()
