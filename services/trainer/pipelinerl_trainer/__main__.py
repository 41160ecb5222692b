"""`python -m pipelinerl_trainer`: one rank of the trainer."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import Wiring, parse_wiring, program, run_service
from pipelinerl_common.settings import load_job


def parse_flags(argv: Sequence[str] | None = None) -> tuple[Wiring, argparse.Namespace]:
    """Returns the wiring that every service has and the trainer's own flags. Exits with status 2 on
    wrong flags and with 0 on --help.
    """
    parser = argparse.ArgumentParser(prog=program(), add_help=False, allow_abbrev=False)
    own = parser.add_argument_group("ranks of the trainer")
    own.add_argument("--rank", type=int, default=0, help="number of this process, from 0")
    own.add_argument("--num-ranks", type=int, default=1, help="processes that train together")
    own.add_argument("--master-address", default="127.0.0.1", help="host of rank 0")
    own.add_argument(
        "--master-port", type=int, default=0, help="port that rank 0 opens for the others"
    )
    own.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest checkpoint below --output, if there is one",
    )
    own.add_argument(
        "--last-metrics",
        type=Path,
        help="file that gets the newest step's numbers when training is finished",
    )
    wiring = parse_wiring("trainer", argv, parser)
    flags, _ = parser.parse_known_args(argv)
    if not 0 <= flags.rank < flags.num_ranks:
        parser.exit(
            2,
            f"{parser.prog}: --rank {flags.rank} must be from 0 to --num-ranks "
            f"{flags.num_ranks} minus 1\n",
        )
    if flags.num_ranks > 1 and not 0 < flags.master_port < 65536:
        parser.exit(
            2,
            f"{parser.prog}: --master-port {flags.master_port} must be a port when there are "
            "several ranks\n",
        )
    return wiring, flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank and returns the process's exit status."""
    wiring, flags = parse_flags(argv)

    async def run(stop: asyncio.Event) -> None:
        job = load_job(wiring.job_file)
        for option in ("preprocessor", "coordinator"):
            if not getattr(wiring, option):
                raise SettingsError(f"--{option}: not given; the trainer needs its host:port")
        sequence_size = job.spec.trainers.sequence_parallel_size
        if flags.num_ranks % sequence_size:
            raise SettingsError(
                f"--num-ranks {flags.num_ranks} must be a multiple of "
                f"trainers.sequenceParallelSize={sequence_size}"
            )

        # Not at the top: torch takes seconds, and flags and settings are checked before.
        from pipelinerl_trainer.engine import prepare_environment
        from pipelinerl_trainer.ranks import RankPlacement
        from pipelinerl_trainer.start import TrainerArgs, run_rank

        local_rank = flags.rank % job.spec.trainers.processes_per_node
        prepare_environment(local_rank, flags.rank, flags.num_ranks)
        master = flags.master_address, flags.master_port
        placement = RankPlacement(flags.rank, flags.num_ranks, local_rank, *master, sequence_size)
        args = TrainerArgs(job, wiring, placement, flags.resume, flags.last_metrics)
        await run_rank(args, stop)

    return run_service(run, name=wiring.name, log_level=wiring.log_level)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the training thread may hang in a collective with a rank that died, which
    # nothing can interrupt.
    os._exit(status)
