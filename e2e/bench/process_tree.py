"""A process and all that came from it, from one look at /proc."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PARENT, OWN_TIMES = 1, slice(11, 15)
"""Places in /proc/N/stat behind the name: parent; user and system time, of the process and of its
ended children.
"""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    cpu_seconds: float
    """With that of its children that have ended and were waited for."""


def tree(root: int) -> Iterator[Process]:
    """`root` and all below it, parents before their children; nothing when it has ended."""
    processes = {
        each.pid: each for each in map(_process, Path("/proc").iterdir()) if each is not None
    }
    children: dict[int, list[int]] = defaultdict(list)
    for each in processes.values():
        children[each.parent].append(each.pid)
    waiting = [root] if root in processes else []
    while waiting:
        pid = waiting.pop()
        yield processes[pid]
        waiting += children[pid]


def _process(folder: Path) -> Process | None:
    """None for what is not one, or has ended."""
    if not folder.name.isdigit():
        return None
    try:
        stat = (
            (folder / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return Process(
        int(folder.name), int(stat[PARENT]), sum(map(int, stat[OWN_TIMES])) / TICKS_PER_SECOND
    )
