"""`python -m pipelinerl_actor.rollout`: the rollout loop of one actor."""

import asyncio
import sys
from collections.abc import Sequence

from pipelinerl_common.service import parse_wiring, run_service


def main(argv: Sequence[str] | None = None) -> int:
    wiring = parse_wiring("rollout", argv, name="actor-0")

    async def run(stop: asyncio.Event) -> None:
        from pipelinerl_actor.rollout.start import run_actor

        await run_actor(wiring, stop)

    return run_service(run, name=wiring.name, log_level=wiring.log_level)


if __name__ == "__main__":
    sys.exit(main())
