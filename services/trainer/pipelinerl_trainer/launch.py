"""`python -m pipelinerl_trainer.launch --processes N --rank FIRST ...`: the N ranks of one node as
processes.

All other flags are the ranks'; only the rank, the name and the metrics differ. Signals are
forwarded to all ranks. A rank that fails ends all: the others would wait for it in a collective.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_common.child_process import send_signal
from pipelinerl_common.service import EXIT_DONE, program, run_service
from pipelinerl_common.telemetry import LEVELS

log = logging.getLogger(__name__)

RANK_MODULE = "pipelinerl_trainer"
FAILED_GRACE_S = 10.0
"""Time for the others to end by themselves after a failure; a rank that hangs in a collective does
not.
"""
FORWARD_PERIOD_S = 0.2
LAST_S = 1800.0
"""Longest time between the first and the last rank's normal end: rank 0 exports the model
meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """The ranks of one node and their common `flags`."""

    first_rank: int
    num_processes: int
    flags: tuple[str, ...]
    metrics_listen: str = ""
    log_level: str = "info"
    module: str = RANK_MODULE

    def argv(self, local_rank: int) -> tuple[str, ...]:
        rank = self.first_rank + local_rank
        metrics = (
            ("--metrics-listen", self.metrics_listen)
            if self.metrics_listen and local_rank == 0
            else ()
        )
        own = ("--rank", str(rank), "--name", f"trainer-{rank}", "--log-level", self.log_level)
        return (sys.executable, "-m", self.module, *self.flags, *own, *metrics)


def parse_node(argv: Sequence[str] | None = None) -> Node:
    """Parses the node's flags and keeps the ranks'. Exits with status 2 on wrong ones."""
    parser = argparse.ArgumentParser(
        prog=program(),
        description="Several ranks of the trainer on one node.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True, help="ranks on this node")
    parser.add_argument("--rank", type=int, default=0, help="the first of them")
    parser.add_argument("--name", help="ignored: ranks are named after their number")
    parser.add_argument(
        "--metrics-listen", default="", help="host:port of the first rank's /metrics"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    own, rest = parser.parse_known_args(argv)
    if own.processes < 1:
        parser.exit(2, f"{parser.prog}: --processes {own.processes} must be at least 1\n")
    return Node(own.rank, own.processes, tuple(rest), own.metrics_listen, own.log_level)


async def run_node(node: Node, stop: asyncio.Event) -> int:
    """Runs the ranks to their end and returns the node's exit status: the first failed rank's or 0.

    Waits for the ranks, and is unblocked by the end of one, the deadline after the first end, or
    `stop`, which is forwarded to them.
    """
    ranks: list[asyncio.subprocess.Process] = []
    waiting: dict[asyncio.Task[int], int] = {}
    forwarding = asyncio.create_task(_forward(stop, ranks), name="forward")
    status, deadline_s = EXIT_DONE, None
    try:
        for local in range(node.num_processes):
            ranks.append(await asyncio.create_subprocess_exec(*node.argv(local)))
            waiting[asyncio.create_task(ranks[-1].wait())] = node.first_rank + local
        while waiting and status == EXIT_DONE:
            done, _ = await asyncio.wait(
                waiting, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                text = "ranks=%s still run %g s after another has ended"
                log.error(text, sorted(waiting.values()), LAST_S)
                status = 1
            for task in done:
                rank, code = waiting.pop(task), _status(task.result())
                log.info("rank=%d ended with status=%d", rank, code)
                status = status or code
            deadline_s = LAST_S
        # Ranks between collectives end by themselves; those inside one are killed below.
        if waiting:
            for each in ranks:
                send_signal(each, signal.SIGTERM)
            await asyncio.wait(waiting, timeout=FAILED_GRACE_S)
    finally:
        forwarding.cancel()
        for each in ranks:
            send_signal(each, signal.SIGKILL)
        await asyncio.gather(*(rank.wait() for rank in ranks))
    return status


async def _forward(stop: asyncio.Event, ranks: Sequence[asyncio.subprocess.Process]) -> None:
    """Sends SIGTERM once to every rank after `stop`, also to those that are started later."""
    await stop.wait()
    signalled: set[int] = set()
    while True:
        fresh = [rank for rank in ranks if rank.pid not in signalled]
        for rank in fresh:
            send_signal(rank, signal.SIGTERM)
        signalled.update(rank.pid for rank in fresh)
        await asyncio.sleep(FORWARD_PERIOD_S)


def _status(returncode: int) -> int:
    """Returns a shell's exit status: 128 plus the number of the signal that ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks of one node and returns the process's exit status."""
    node = parse_node(argv)
    statuses: list[int] = []

    async def run(stop: asyncio.Event) -> None:
        statuses.append(await run_node(node, stop))

    own = run_service(run, name="trainer-node", log_level=node.log_level)
    return statuses[0] if statuses else own


if __name__ == "__main__":
    sys.exit(main())
