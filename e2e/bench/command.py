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


class Bench(NamedTuple):
    """One subcommand. `module` offers `bench(args: argparse.Namespace) -> Report`."""

    help: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def _stream_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=5,
        help="rounds of ours and baseline in turn; the median counts",
    )
    parser.add_argument("--groups", type=_positive, default=1000, help="groups per round")
    parser.add_argument("--group-size", type=_positive, default=8, help="samples per group")
    parser.add_argument(
        "--median-tokens",
        type=_positive,
        default=900,
        help="median completion length; the mean is about 1.4 times it",
    )
    parser.add_argument("--max-tokens", type=_positive, default=8192, help="longest completion")


def _weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=_positive, default=5, help="updates per mode and pace; the median counts"
    )
    parser.add_argument(
        "--model", type=Path, help="model folder; without it a random Qwen3 is made"
    )
    parser.add_argument(
        "--megabytes",
        type=_positive,
        default=256,
        help="size of the random model's float32 weights, about",
    )
    parser.add_argument(
        "--pace", type=_positive, default=100, help="megabytes per second of the paced sender"
    )
    parser.add_argument(
        "--requests", type=_positive, default=2, help="completions that run during every update"
    )
    parser.add_argument(
        "--engine", choices=["vllm", "transformers"], default="vllm", help="the generator's engine"
    )


def _packing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=_positive, default=20, help="batches packed")
    parser.add_argument("--samples", type=_positive, default=1024, help="samples per batch")
    parser.add_argument("--ranks", type=_positive, default=4, help="trainer ranks")
    parser.add_argument(
        "--slots", type=_positive, default=12000, help="token slots of a micro-batch"
    )
    parser.add_argument(
        "--median-tokens", type=_positive, default=900, help="median completion length"
    )
    parser.add_argument("--max-tokens", type=_positive, default=8192, help="longest completion")


def _operator_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=_positive, default=1000, help="jobs on the operator")


def _telemetry_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=_positive, default=5, help="pairs of runs; the median counts"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=40,
        help="optimizer steps of each run, the first three to warm up",
    )
    parser.add_argument(
        "--engine", choices=["vllm", "transformers"], default="vllm", help="the generator's engine"
    )


BENCHES: dict[str, Bench] = {
    "operator": Bench(
        "the operator with many jobs on a real API server",
        "bench.operator",
        _operator_arguments,
    ),
    "stream": Bench(
        "samples from actor to preprocessor, against Redis and pickle",
        "bench.stream",
        _stream_arguments,
    ),
    "weights": Bench(
        "in-flight weight updates of a live generator, against a raw broadcast",
        "bench.weights",
        _weights_arguments,
    ),
    "packing": Bench(
        "packing of samples into micro-batches, against first fit in arrival order",
        "bench.packing",
        _packing_arguments,
    ),
    "telemetry": Bench(
        "runs that are scraped and traced, against runs that are not",
        "bench.telemetry",
        _telemetry_arguments,
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
        bench.add_arguments(sub)


def main() -> int:
    """Runs the chosen bench and prints its report. The exit status is 0 for a finished or skipped
    bench, whatever it measured.
    """
    parser = argparse.ArgumentParser(
        prog="e2e/bench/run", description="Measures against baselines."
    )
    add_arguments(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    bench: Callable[[argparse.Namespace], Report] = importlib.import_module(
        BENCHES[args.bench].module
    ).bench
    try:
        show(bench(args), as_json=args.json)
    except PipelineRLError as error:
        print(f"e2e/bench/run {args.bench}: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def _end(signum: int, frame: FrameType | None) -> None:
    """Unwinds the stack, so that the processes that a bench started end with it."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
