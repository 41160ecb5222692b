"""`python -m pipelinerl_actor.evaluation`: evaluates a run's checkpoints on the job's evaluation
sets, as the trainer writes them.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_common.service import parse_wiring, run_service


def main(argv: Sequence[str] | None = None) -> int:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument(
        "--last-result", type=Path, help="file that gets the last step's result as text"
    )
    wiring = parse_wiring("evaluator", argv, own)
    flags, _ = own.parse_known_args(argv)

    async def run(stop: asyncio.Event) -> None:
        from pipelinerl_actor.evaluation.loop import run_evaluator

        await run_evaluator(wiring, stop, flags.last_result)

    return run_service(run, name=wiring.name, log_level=wiring.log_level)


if __name__ == "__main__":
    sys.exit(main())
