"""The bench of sharded updates: four trainer ranks send to four generators of two workers each,
over links that are paced to the rate of a slow network.

Every trainer rank and every generator is a host: a network namespace with one link to a common
bridge, both directions paced. The baseline is a broadcast of the whole model from rank 0 to every
worker, as one process group of gloo does it. `bound_seconds` is the time that the bytes through the
busiest link take at its rate.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.report import Row, Value, at_least, at_most, progress
from bench.sharded_member import (
    NUM_GENERATORS,
    NUM_SENDERS,
    TENSOR_PARALLEL,
    TIMEOUT_S,
    WORLD_SIZE,
    manifest_of,
)
from pipelinerl_common.errors import SettingsError

MEGABYTE = 10**6
LINK = MEGABYTE * 100
"""Bytes per second of every link, in each direction."""
PREFIX, SUBNET, PORT = "prlbench", "10.213.77", 29500
STOP_S = 10.0


def measure(megabytes: int, rounds: int) -> dict[str, Value]:
    """Returns the JSON object of the bench. Raises SettingsError where no network namespaces can be
    made.
    """
    with ExitStack() as stack:
        hosts = stack.enter_context(_network(NUM_SENDERS + NUM_GENERATORS))
        members = [
            stack.enter_context(_member(hosts[_host_of(rank)], rank, megabytes))
            for rank in range(WORLD_SIZE)
        ]
        for member in members:
            _line(member)
        model = manifest_of(megabytes).num_bytes
        _all(members, "update")  # makes the plan, and touches memory for the first time
        _all(members, "broadcast")
        updates: list[dict[str, float]] = []
        broadcasts: list[float] = []
        for number in range(rounds):
            progress(f"sharded: round {number + 1} of {rounds}")
            before = [_received(host) for host in hosts]
            answers = _all(members, "update")
            after = [_received(host) for host in hosts]
            into = [end - start for start, end in zip(before, after, strict=True)][NUM_SENDERS:]
            updates.append(_facts(answers, into, model))
            broadcasts.append(_all(members, "broadcast")[0]["seconds"])
    values: dict[str, Value] = {
        key: median(update[key] for update in updates) for key in updates[0]
    }
    through_rank0 = median(broadcasts)
    return {"bytes": model, "through_rank0_seconds": through_rank0, **values}


def _facts(answers: list[dict[str, Any]], into: list[int], model: int) -> dict[str, float]:
    senders, workers = answers[:NUM_SENDERS], answers[NUM_SENDERS:]
    common = {worker["checksum"] for worker in workers} | {senders[0]["checksum"]}
    if len(common) != 1 or not all(worker["is_right"] for worker in workers):
        raise AssertionError("a worker has other weights than were sent")
    sent = [sender["sent"] for sender in senders]
    return {
        "update_seconds": senders[0]["seconds"],
        "bound_seconds": max(*sent, *into) / LINK,
        "sender_imbalance": max(sent) / mean(sent) - 1,
        "node_bytes_over_model": max(into) / model,
        "rank0_extra_bytes_over_model": senders[0]["extra"] / model,
    }


def rows(values: dict[str, Any]) -> list[Row]:
    """Returns the report's lines."""
    update = values["update_seconds"]
    return [
        at_least(
            "sharded: broadcast through rank 0 / update",
            values["through_rank0_seconds"] / update,
            3,
        ),
        at_most("sharded: update / bound of the links", update / values["bound_seconds"], 1.3),
        at_most("sharded: busiest sender / mean - 1", values["sender_imbalance"], 0.1),
        at_most("sharded: bytes into a node / model", values["node_bytes_over_model"], 1.05),
    ]


def _host_of(rank: int) -> int:
    return rank if rank < NUM_SENDERS else NUM_SENDERS + (rank - NUM_SENDERS) // TENSOR_PARALLEL


def _address(host: int) -> str:
    return f"{SUBNET}.{host + 1}"


@contextmanager
def _network(num_hosts: int) -> Iterator[list[str]]:
    """Yields the names of namespaces that a bridge connects."""
    names = [f"{PREFIX}{host}" for host in range(num_hosts)]
    # A burst of two milliseconds, so that what is sent in any longer time keeps to the rate; and
    # the queue of a deep buffer, so that two senders to one host wait and lose nothing.
    pace = ("root", "tbf", "rate", f"{LINK * 8}bit", "burst", "256kb", "latency", "500ms")
    _remove(names)  # of a bench that was killed
    try:
        _ip("link", "add", PREFIX, "type", "bridge")
        _ip("link", "set", PREFIX, "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            outside = f"{name}o"
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outside, "master", PREFIX, "up")
            _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # A rank sends to each receiver in turn: its connections are idle most of the time.
            setting = "net.ipv4.tcp_slow_start_after_idle=0"
            _run("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            _run("tc", "qdisc", "add", "dev", outside, *pace)
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *pace)
        yield names
    finally:
        _remove(names)


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
    subprocess.run(("ip", "link", "del", PREFIX), capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise SettingsError(
            f"sharded: no network namespaces here ({' '.join(command[:3])}: {reason.strip()}); "
            "run as root with iproute2"
        ) from error


def _received(name: str) -> int:
    """Bytes that have come into the namespace, headers included."""
    return int(Path(f"/sys/class/net/{name}o/statistics/tx_bytes").read_text())


@contextmanager
def _member(host: str, rank: int, megabytes: int) -> Iterator[subprocess.Popen[str]]:
    number = int(host.removeprefix(PREFIX))
    environment = {"HOST": _address(number), "LEADER": _address(0)}
    process = subprocess.Popen(
        (
            *("ip", "netns", "exec", host, "env", *(f"{k}={v}" for k, v in environment.items())),
            *(sys.executable, "-P", "-m", "bench.sharded_member"),
            *map(str, (rank, PORT, megabytes)),
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # closes its pipes
        try:
            yield process
        finally:
            process.kill()
            process.wait(STOP_S)


def _all(members: list[subprocess.Popen[str]], verb: str) -> list[dict[str, Any]]:
    """Lets every member do something and returns their answers."""
    # Receivers first: the time counts from the moment when all are ready.
    for member in reversed(members):
        assert member.stdin is not None
        member.stdin.write(f"{verb}\n")
        member.stdin.flush()
    return [json.loads(_line(member)) for member in members]


def _line(member: subprocess.Popen[str]) -> str:
    """Waits for a member's next line; a member gives up by itself after TIMEOUT_S."""
    assert member.stdout is not None
    line = member.stdout.readline()
    if not line:
        status = member.wait(TIMEOUT_S)
        raise AssertionError(f"a member ended with status {status}; its error is above")
    return line
