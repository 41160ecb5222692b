"""python -m pipelinerl_actor.generator --job job.yaml --output DIR --listen HOST:PORT [--model
FOLDER] [--serve-initial]
"""

import argparse
import asyncio
import sys
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.service import parse_wiring, run_service


def main(argv: list[str] | None = None) -> int:
    """Runs one generator until SIGTERM. Returns the exit status, see run_service."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--model", type=Path, help="the model's folder; default: <output>/model")
    own.add_argument(
        "--serve-initial", action="store_true", help="serve the folder's weights before any update"
    )
    own.add_argument(
        "--initial-version", type=int, default=0, help="their policy version; default 0"
    )
    wiring = parse_wiring("generator", argv, own)
    flags, _ = own.parse_known_args(argv)
    model: Path = flags.model or wiring.output / MODEL

    async def serve(stop: asyncio.Event) -> None:
        # Not at the top: it imports torch, which --help does not need.
        from pipelinerl_actor.generator.service import serve_generator

        await serve_generator(
            wiring, model, stop, version=flags.initial_version if flags.serve_initial else None
        )

    return run_service(serve, name=wiring.name, log_level=wiring.log_level)


if __name__ == "__main__":
    sys.exit(main())
