"""`e2e/bench/run NAME`: arguments and dispatch. Each bench is imported when it runs."""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from bench.report import Report, show
from pipelinerl_common.errors import PipelineRLError, SettingsError

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


class Bench(NamedTuple):
    """One subcommand. `module` offers `bench(args: argparse.Namespace) -> Report`; `numbers` are
    its options that take a whole number of at least 1: default and help by name.
    """

    help: str
    module: str
    numbers: dict[str, tuple[int, str]]
    has_engine: bool = False


BENCHES: dict[str, Bench] = {
    "operator": Bench(
        "the operator with many jobs on a real API server",
        "bench.operator_jobs",
        {"jobs": (1000, "jobs on the operator")},
    ),
    "stream": Bench(
        "samples from actor to preprocessor, against Redis and pickle",
        "bench.stream",
        {
            "rounds": (5, "rounds of ours and baseline in turn; the median counts"),
            "groups": (1000, "groups per round"),
            "group-size": (8, "samples per group"),
            "median-tokens": (900, "median completion length; the mean is about 1.4 times it"),
            "max-tokens": (8192, "longest completion"),
        },
    ),
    "weights": Bench(
        "in-flight weight updates of a live generator, against a raw broadcast",
        "bench.weights",
        {
            "rounds": (5, "updates per mode and pace; the median counts"),
            "megabytes": (256, "size of the random model's float32 weights, about"),
            "pace": (100, "megabytes per second of the paced sender"),
            "requests": (2, "completions that run during every update"),
            "sharded-megabytes": (200, "megabytes of the model of the sharded update"),
        },
        has_engine=True,
    ),
    "packing": Bench(
        "packing of samples into micro-batches, against first fit in arrival order",
        "bench.packing",
        {
            "rounds": (20, "batches packed"),
            "samples": (1024, "samples per batch"),
            "ranks": (4, "trainer ranks"),
            "slots": (12000, "token slots of a micro-batch"),
            "median-tokens": (900, "median completion length"),
            "max-tokens": (8192, "longest completion"),
        },
    ),
    "telemetry": Bench(
        "runs that are scraped and traced, against runs that are not",
        "bench.telemetry",
        {
            "rounds": (5, "pairs of runs; the median counts"),
            "steps": (40, "optimizer steps of each run, the first three to warm up"),
        },
        has_engine=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand per bench to `parser`."""
    commands = parser.add_subparsers(
        dest="bench", required=True, metavar="{" + ",".join(BENCHES) + "}"
    )
    for name, bench in BENCHES.items():
        sub = commands.add_parser(name, help=bench.help, description=bench.help)
        sub.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object and nothing else on standard output",
        )
        sub.add_argument(
            "--quick",
            action="store_true",
            help="smallest workload that exercises everything; its timings mean little",
        )
        sub.add_argument("--seed", type=int, default=1, help="seed of the workload")
        for option, (default, text) in bench.numbers.items():
            sub.add_argument(f"--{option}", type=_positive, default=default, help=text)
        if name == "weights":
            sub.add_argument(
                "--model", type=Path, help="model folder; without it a random Qwen3 is made"
            )
        if bench.has_engine:
            sub.add_argument(
                "--engine",
                choices=["vllm", "transformers"],
                default="vllm",
                help="the generator's engine",
            )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def main() -> int:
    """Runs the chosen bench and prints its report. The exit status is 0 for a finished or skipped
    bench, whatever it measured.
    """
    parser = argparse.ArgumentParser(
        prog="e2e/bench/run", description="Measures against baselines."
    )
    add_arguments(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _unwind)
    bench: Callable[[argparse.Namespace], Report] = importlib.import_module(
        BENCHES[args.bench].module
    ).bench
    try:
        show(bench(args), as_json=args.json)
    except PipelineRLError as error:
        print(f"e2e/bench/run {args.bench}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, SettingsError) else EXIT_FAILED
    return 0


def _unwind(signum: int, frame: FrameType | None) -> None:
    """Unwinds the stack on SIGTERM, so that the processes that a bench started end with it."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
