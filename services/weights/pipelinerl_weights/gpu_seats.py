"""The processes of a GPU check: started at places, which are this machine or containers that a
command prefix reaches, and followed until they have answered. See gpu_check.py for what they do.
"""

import json
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelinerl_common.errors import Unavailable

MODULE = "pipelinerl_weights.gpu_check"
FACTS_S, END_S = 120.0, 10.0

Facts = Mapping[str, Any]


@dataclass(slots=True)
class Seat:
    """A machine or container that processes can be started in."""

    name: str
    """Example: "math-trainer-0/trainer"."""
    command: tuple[str, ...]
    has_gpus: bool
    facts: Facts = field(default_factory=dict)
    """As `pipelinerl_weights.gpu_check` prints them; {"error": reason} without."""
    transport: str = ""

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts the check's module there. Raises Unavailable."""
        try:
            return subprocess.Popen(
                [*self.command, "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise Unavailable(f"{self.name}: {self.command[0]} cannot be run: {error}") from error


def ask_facts(seat: Seat) -> Facts:
    """Returns what is at the place, or {"error": reason}."""
    process = seat.start("facts")
    try:
        return _answer(process, time.monotonic() + FACTS_S)
    finally:
        process.kill()


def _answer(process: "subprocess.Popen[str]", deadline: float) -> dict[str, Any]:
    """The last line that the process prints, as JSON; {"error": reason} when there is none."""
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"error": "it has not answered in time"}
    lines = output.strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        reason = (errors.strip().splitlines()[-1:] or ["without a message"])[0]
        return {"error": f"it ended with status {process.returncode}: {reason}"}
    return answer


def run_group(
    places: Sequence[tuple[Seat, int]], backend: str, num_bytes: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Starts one member for each place and device, in the order of ranks, and returns what they
    measured, or {"error": reason} of each. Without rank 0 only its error is returned.
    """
    deadline = time.monotonic() + timeout_s + END_S
    processes: list[subprocess.Popen[str]] = []
    try:
        return list(_results(processes, places, backend, num_bytes, deadline))
    finally:
        for process in processes:
            process.kill()


def _results(
    processes: "list[subprocess.Popen[str]]",
    places: Sequence[tuple[Seat, int]],
    backend: str,
    num_bytes: int,
    deadline: float,
) -> Iterator[dict[str, Any]]:
    limit_s = max(1.0, deadline - END_S - time.monotonic())
    timeout = f"--timeout={limit_s}"
    common = (
        timeout,
        f"--world-size={len(places)}",
        f"--backend={backend}",
        f"--bytes={num_bytes}",
    )
    meeting: tuple[str, ...] = ()
    for rank, (seat, device) in enumerate(places):
        flags = (f"--rank={rank}", f"--device={device}", *common, *meeting)
        process = seat.start("member", *flags)
        processes.append(process)
        if rank:
            continue
        first = _first_line(process, deadline)
        if "port" not in first:
            process.kill()
            yield first or _answer(process, deadline)
            return
        meeting = (f"--address={first['address']}", f"--port={first['port']}")
    for process in processes:
        yield _answer(process, deadline)


def _first_line(process: "subprocess.Popen[str]", deadline: float) -> dict[str, Any]:
    """Where rank 0 listens, or its error; {} when it says nothing."""
    assert process.stdout is not None
    # A limit, since kubectl may wait for a node that is gone.
    if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return {"error": "it has not started in time"}
    try:
        first: dict[str, Any] = json.loads(process.stdout.readline())
    except ValueError:
        return {}
    return first
