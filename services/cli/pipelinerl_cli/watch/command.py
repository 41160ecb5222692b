"""`pipelinerl watch DIR|JOB`: live numbers of a run's folder, or of a job in the cluster."""

import argparse

from pipelinerl_common.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="DIR|JOB",
        help="a run's folder, or the name of a PipelineRLJob in the cluster",
    )
    parser.add_argument("--once", action="store_true", help="print the numbers as they are, once")
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        help="seconds between looks; default 0.5, in a cluster 5",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAME",
        help="the job's namespace; default that of kubectl's context",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="context of kubectl's configuration; default its current one",
    )


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from pipelinerl_cli.watch.cluster import ClusterJob
    from pipelinerl_cli.watch.loop import Source, watch
    from pipelinerl_cli.watch.run_folder import RunFolderSource
    from pipelinerl_common.words import did_you_mean_folder

    if args.interval is not None and not 0.05 <= args.interval <= 3600:
        raise SettingsError(f"--interval {args.interval:g}: give 0.05 to 3600 seconds")
    folder = Path(args.target)
    source: Source
    if folder.is_dir():
        source = RunFolderSource.open(folder)
    elif "/" in args.target:
        raise SettingsError(
            f"{args.target}: no such folder; give the --output folder of a `pipelinerl "
            f"up`{did_you_mean_folder(folder)}"
        )
    else:
        source = ClusterJob.named(args.target, namespace=args.namespace, context=args.context)
    return watch(source, once=args.once, interval_s=args.interval or source.interval_s)
