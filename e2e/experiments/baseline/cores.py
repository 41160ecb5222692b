"""What each process of a run takes of the machine's cores, from /proc."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.process_tree import TICKS_PER_SECOND, tree

PROC = Path("/proc")
IDLE = (3, 4)
"""Places in the first line of /proc/stat: idle, and waiting for a disk."""


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Core-seconds up to `time`, seconds since the epoch. Example: CoreUse(1764446400.5,
    {"trainer": 12.5}, 80.0).
    """

    time: float
    by_role: dict[str, float]
    """Since the processes began."""
    machine: float
    """Of everything on the machine, since it began."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def measure(root: int, now: float) -> CoreUse:
    """Of the process `root` and all that came from it."""
    by_role: dict[str, float] = defaultdict(float)
    roles: dict[int, str] = {}
    for each in tree(root):
        role = roles[each.pid] = _role(each.pid) or roles.get(each.parent, "up")
        by_role[role] += each.cpu_seconds
    return CoreUse(now, dict(by_role), _machine())


def read(path: Path) -> list[CoreUse]:
    """Empty where nothing was measured."""
    return (
        [CoreUse(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


@dataclass(frozen=True, slots=True)
class Cores:
    """In use on average. Example: Cores({"trainer": 0.6, "generator": 0.9}, 0.05)."""

    by_role: dict[str, float]
    others: float
    """By whatever else is on the machine."""


def between(uses: list[CoreUse]) -> Cores | None:
    """From the first to the last of `uses`; None of fewer than two."""
    if len(uses) < 2:
        return None
    first, last = uses[0], uses[-1]
    seconds = last.time - first.time
    roles = {
        role: (total - first.by_role.get(role, 0.0)) / seconds
        for role, total in last.by_role.items()
    }
    return Cores(roles, max(0.0, (last.machine - first.machine) / seconds - sum(roles.values())))


def _role(pid: int) -> str | None:
    """Example: "generator" of a process that was started with --name generator-0-0; None for one
    without a name.
    """
    try:
        words = (
            (PROC / str(pid) / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        )
    except OSError:
        return None
    if words[0].endswith("nats-server"):
        return "nats-server"
    return words[words.index("--name") + 1].partition("-")[0] if "--name" in words[:-1] else None


def _machine() -> float:
    times = list(
        map(int, (PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9])
    )
    return (sum(times) - sum(times[place] for place in IDLE)) / TICKS_PER_SECOND
