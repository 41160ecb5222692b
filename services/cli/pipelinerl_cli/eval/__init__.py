"""`pipelinerl eval CHECKPOINT JOB`: pass@k of saved weights. Here are its arguments; `evaluation`
does the work and is imported when it is needed.
"""

import argparse
from pathlib import Path

from pipelinerl_cli.terminal import at_least_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a folder in Hugging Face format, a run's checkpoint, or a run's folder",
    )
    parser.add_argument(
        "job",
        type=Path,
        metavar="JOB",
        help="a job file: its task, model and generator settings are used",
    )
    parser.add_argument(
        "--prompts",
        type=at_least_one,
        default=200,
        metavar="N",
        help="prompts 0 to N-1 of the task (default 200)",
    )
    parser.add_argument(
        "--samples",
        type=at_least_one,
        metavar="N",
        help="answers per prompt (default: the largest k)",
    )
    parser.add_argument(
        "--k", type=_ks, default=(1,), metavar="K[,K]", help="which pass@k (default 1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the task's prompts (default: the job's, plus 1: other prompts)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the job's")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="another value for a setting of the job",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from pipelinerl_cli.eval.evaluation import evaluate

    return evaluate(args)


def _ks(text: str) -> tuple[int, ...]:
    return tuple(sorted({at_least_one(part) for part in text.split(",")}))
