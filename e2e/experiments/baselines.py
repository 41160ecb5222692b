"""Measures in-flight RL against conventional RL: the same job, code and cores, several seeds.

    python e2e/experiments/baselines.py run --output FOLDER [--seeds 5] [--conventional 1,2,4,8]
                                            [--steps 60] [--cores 2]
    python e2e/experiments/baselines.py report FOLDER [--json FILE] [--markdown FILE]
                                               [--plot FOLDER]

Conventional RL generates the batches of G optimizer steps, trains them, publishes the weights, and
generates again. `run` first searches for the G to compare with, on a seed of its own: of those
whose reward reaches the goal and does not collapse, the one that reaches it first, each process
computing with its share of the cores, and the best once more with all of them. Only conventional RL
is tuned in this way. Then each reported seed runs in flight, with that G, and with G = 1, in turn,
so that slow drifts of the machine affect all of them alike. Finished runs are kept: the same
command resumes an experiment that was stopped.

Time counts from the first generated token of a run: model preparation, engine start and the first
weights are left out.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "e2e"))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def steps_per_round(text: str) -> tuple[int, ...]:
    """Example: "1,2,4" is (1, 2, 4)."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers of at least 1, such as 1,2,4,8"
        )
    return tuple(sorted({int(part) for part in parts}))


def parse() -> argparse.Namespace:
    from pipelinerl_cli.terminal import at_least_one

    parser = argparse.ArgumentParser(
        description="In-flight RL against conventional RL on the same job, code and cores, over "
        "several seeds."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="make the runs, or resume them",
        epilog="A run of 60 steps takes about a minute on two cores: 5 seeds and 4 values of G are "
        "at most 20 runs, 25 to 30 "
        "minutes. Nothing else should run on the machine; the report says how much did.",
    )
    run.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="the experiment's folder"
    )
    run.add_argument(
        "--seeds",
        type=at_least_one,
        default=5,
        metavar="N",
        help="number of reported seeds, 1 to N; default 5",
    )
    run.add_argument(
        "--conventional",
        type=steps_per_round,
        default=(1, 2, 4, 8),
        metavar="G,...",
        help="values of G among which the best is searched; default 1,2,4,8",
    )
    run.add_argument(
        "--steps",
        type=at_least_one,
        default=60,
        metavar="N",
        help="optimizer steps of each run; default 60",
    )
    run.add_argument(
        "--goal",
        type=float,
        default=0.8,
        metavar="R",
        help="reward to reach; the time until then is compared; default 0.8",
    )
    run.add_argument(
        "--cores",
        type=at_least_one,
        default=2,
        metavar="N",
        help="cores of the machine that each run uses; default 2",
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="another value for a setting below spec, in all runs",
    )
    job = ROOT / "e2e" / "jobs" / "arithmetic.yaml"
    run.add_argument(
        "--job",
        type=Path,
        default=job,
        metavar="FILE",
        help="the in-flight job; default e2e/jobs/arithmetic.yaml",
    )
    report = commands.add_parser("report", help="report the results")
    report.add_argument("folder", type=Path, metavar="FOLDER", help="the --output of a run")
    report.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    report.add_argument("--markdown", type=Path, metavar="FILE", help="write the report there")
    report.add_argument("--plot", type=Path, metavar="FOLDER", help="write the plots there, as SVG")
    return parser.parse_args()


def run(flags: argparse.Namespace) -> None:
    from experiments.baseline.runs import Experiment, Plan
    from pipelinerl_common.errors import SettingsError

    available = sorted(os.sched_getaffinity(0))
    if flags.cores > len(available):
        raise SettingsError(
            f"--cores {flags.cores}: this process may use {len(available)}; give no more"
        )
    os.sched_setaffinity(0, available[: flags.cores])
    plan = Plan(
        str(flags.job),
        flags.seeds,
        flags.conventional,
        flags.steps,
        flags.goal,
        flags.cores,
        tuple(flags.set),
    )
    Experiment(flags.output, plan, say).run()


def report(flags: argparse.Namespace) -> None:
    from experiments.baseline.report import Report

    made = Report.of(flags.folder)
    say(made.markdown())
    if flags.json is not None:
        flags.json.write_text(made.json(), encoding="utf-8")
    if flags.markdown is not None:
        flags.markdown.write_text(made.markdown(), encoding="utf-8")
    if flags.plot is not None:
        flags.plot.mkdir(parents=True, exist_ok=True)
        for name, picture in made.pictures():
            (flags.plot / f"{name}.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    from pipelinerl_common.errors import PipelineRLError

    flags = parse()
    try:
        (run if flags.command == "run" else report)(flags)
    except PipelineRLError as error:
        sys.exit(f"baselines {flags.command}: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes it")


if __name__ == "__main__":
    main()
