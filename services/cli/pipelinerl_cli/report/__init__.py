"""`pipelinerl report DIR`: writes summary.json and report.html from metrics.jsonl again."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="the run's folder")


def run(args: argparse.Namespace) -> int:
    from pipelinerl_cli.report.page import write_results
    from pipelinerl_cli.run_folder import load_run
    from pipelinerl_common.errors import SettingsError

    earlier = load_run(args.run)
    try:
        write_results(args.run, earlier.job, earlier.status, earlier.failure)
    except OSError as error:
        raise SettingsError(
            f"{args.run}: summary and report cannot be written: {error}; make room or make the "
            "folder writable"
        ) from error
    print(args.run / "report.html")
    return 0
