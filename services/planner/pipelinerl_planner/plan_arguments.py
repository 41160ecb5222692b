"""The flags of `pipelinerl plan`; without them it plans the paper's case study."""

import argparse
from pathlib import Path

CASE_GPUS, CASE_BATCH, CASE_LENGTHS, CASE_TAU = 128, 128, "uniform:1:2048", 4.92
"""The paper's case study (appendix A.4); its longest length is left open and hardly matters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help="take GPUs, batch, group size and longest response from a job",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help=f"GPUs, generating and training together (default {CASE_GPUS})",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help=f"sequences of an optimizer step (default {CASE_BATCH})",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="trajectories per prompt (default 8)"
    )
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:CAP, or a trace (.csv or .jsonl) with "
        "response_tokens "
        f"(default {CASE_LENGTHS}, with --job uniform up to its maxTokens)",
    )
    parser.add_argument(
        "--tau",
        type=float,
        metavar="T",
        help=f"flashes of a GPU to train a token (default {CASE_TAU})",
    )
    parser.add_argument(
        "--train-tokens-per-second",
        type=float,
        metavar="R",
        help="of one training GPU, in place of --tau; needs --utilization",
    )
    parser.add_argument(
        "--utilization",
        type=Path,
        metavar="FILE",
        help="U(h) measured by `pipelinerl calibrate` (default: an H100's, built in)",
    )
    parser.add_argument(
        "--max-lag",
        type=int,
        metavar="STEPS",
        help="largest g_max (default: that of the greatest speed-up)",
    )
    parser.add_argument(
        "--max-running",
        type=int,
        default=512,
        metavar="H",
        help="largest H that is tried (default 512)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="K",
        help="of the trainers' nodes (default 8)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="throughput over lag to a .svg or .html file"
    )
