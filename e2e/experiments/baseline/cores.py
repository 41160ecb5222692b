"""The core-seconds that each process of a run uses."""

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.processes import cpu_seconds, process_tree


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Core-seconds used up to `time`, seconds since the epoch. Example: CoreUse(1764446400.5,
    {"trainer": 12.5}, 80.0).
    """

    time: float
    by_role: dict[str, float]
    """Core-seconds since the processes started."""
    machine: float
    """Core-seconds of everything on the machine since it was started."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def measure(root: int, now: float) -> CoreUse:
    """Measures the process `root` and all its descendants."""
    by_role: dict[str, float] = defaultdict(float)
    roles: dict[int, str] = {}
    for process in process_tree(root):
        with suppress(psutil.NoSuchProcess):  # it has ended since the tree was read
            role = roles[process.pid] = _role(process) or roles.get(process.ppid(), "up")
            by_role[role] += cpu_seconds(process)
    return CoreUse(now, dict(by_role), _machine())


def read(path: Path) -> list[CoreUse]:
    """Reads the measurements of a run; empty where nothing was measured."""
    return (
        [CoreUse(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores in use on average. Example: Cores({"trainer": 0.6, "generator": 0.9}, 0.05)."""

    by_role: dict[str, float]
    others: float
    """Cores used by everything else on the machine."""


def between(uses: list[CoreUse]) -> Cores | None:
    """Average from the first to the last of `uses`; None for fewer than two."""
    if len(uses) < 2:
        return None
    first, last = uses[0], uses[-1]
    seconds = last.time - first.time
    roles = {
        role: (total - first.by_role.get(role, 0.0)) / seconds
        for role, total in last.by_role.items()
    }
    return Cores(roles, max(0.0, (last.machine - first.machine) / seconds - sum(roles.values())))


def _role(process: psutil.Process) -> str | None:
    """The role of a process by its command; None for one without a name. Example: "generator" for
    a command with --name generator-0-0.
    """
    try:
        command = process.cmdline()
    except psutil.ZombieProcess:
        return None
    if command and command[0].endswith("nats-server"):
        return "nats-server"
    if "--name" in command[:-1]:
        return command[command.index("--name") + 1].partition("-")[0]
    return None


def _machine() -> float:
    times = psutil.cpu_times()
    busy = (times.user, times.nice, times.system, times.irq, times.softirq, times.steal)
    return float(sum(busy))
