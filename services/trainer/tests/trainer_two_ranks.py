"""Runs a test's program as two ranks, and finds ports at which they meet, group after group."""

import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FIRST, LAST = 20_000, 32_000
"""Below the range that Linux gives away by itself: a group's own connections would take ports that
a later group needs.
"""


def free_ports(count: int) -> list[str]:
    """`count` different ports of this machine on which nobody listens."""
    found: list[str] = []
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(str(port))
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports from {FIRST} to {LAST} are free")


def run_two_ranks(folder: Path, program: str, arguments: list[str], timeout_s: float) -> None:
    """`program RANK arguments...` of this folder, twice. Raises AssertionError with the log of the
    one that failed.
    """
    path = str(Path(__file__).with_name(program))
    logs = [folder / f"rank-{rank}.log" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            command = [sys.executable, path, str(rank), *arguments]
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
    deadline = time.monotonic() + timeout_s
    try:
        while (
            None in (statuses := [process.poll() for process in processes])
            and time.monotonic() < deadline
        ):
            if any(statuses):
                break  # the other one would wait for it
            with suppress(subprocess.TimeoutExpired):
                processes[statuses.index(None)].wait(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for status, log in zip(statuses, logs, strict=True):
        assert not status, log.read_text(errors="replace")[-3000:]
    assert None not in statuses, (
        f"not done after {timeout_s:g} s:\n" + logs[0].read_text(errors="replace")[-3000:]
    )
