"""Entry point: `python -m pipelinerl_preprocessor --job FILE --nats-url URL --output DIR`."""

import asyncio
import sys

from pipelinerl_common.service import parse_wiring, run_service


def main() -> int:
    wiring = parse_wiring("preprocessor")

    async def serve_until(stop: asyncio.Event) -> None:
        # After the arguments are read, so that --help is instant.
        from pipelinerl_common.settings import load_job
        from pipelinerl_preprocessor.loop import run

        await run(load_job(wiring.job_file), wiring, stop)

    return run_service(serve_until, name=wiring.name, log_level=wiring.log_level)


if __name__ == "__main__":
    sys.exit(main())
