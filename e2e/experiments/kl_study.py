"""Measures how far from on-policy tokens are that were sampled while the weights changed: the
paper's section 5.1 on a tiny model.

    python e2e/experiments/kl_study.py [--engine transformers] [--starts 0,32,64] [--gmax 16]
                                      [--json FILE] [--plot FOLDER]

A training run leaves a checkpoint after every optimizer step. From some of them on, completions are
sampled while the next checkpoints arrive in flight, with old KV kept or recomputed, and with the
first checkpoint alone, as conventional RL does. Each is compared with the checkpoint that would
train on it, by the KL divergence per token. See kl/study.py, and the
page docs/pages/explanation/experiments.md for results.
"""

import argparse
import sys
from pathlib import Path


def starts(text: str) -> tuple[int, ...]:
    """Example: "0,32,64" is (0, 32, 64)."""
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of optimizer steps, such as 0,32,64"
        )
    return tuple(sorted({int(part) for part in parts}))


def main() -> None:
    from pipelinerl_cli.terminal import at_least_one

    parser = argparse.ArgumentParser(
        description="Measures how far from on-policy in-flight updates and lag take sampling."
    )
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument(
        "--starts",
        type=starts,
        default=(0, 32, 64),
        help="checkpoints to begin at (default: 0,32,64)",
    )
    parser.add_argument(
        "--gmax", type=at_least_one, default=16, help="largest lag (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=at_least_one,
        help="of a completion; a multiple of --gmax (default: 16 times that)",
    )
    parser.add_argument(
        "--sequences",
        type=at_least_one,
        default=32,
        help="sampled per method and start, at least 2 (default: 32)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--plot", type=Path, help="folder for the charts")
    flags = parser.parse_args()
    from experiments.kl.command import Flags, run  # imports torch, which --help does not need
    from experiments.kl.engines import Schedule

    try:
        schedule = Schedule(flags.tokens or 16 * flags.gmax, flags.gmax)
    except ValueError as error:
        parser.error(str(error))
    run(
        Flags(
            flags.engine,
            flags.starts,
            schedule,
            max(2, flags.sequences),
            flags.seed,
            flags.json,
            flags.plot,
        )
    )


if __name__ == "__main__":
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[1])
    )  # its parts are found as tests find them
    main()
