"""`pipelinerl`: one command, its subcommands in a table.

argparse, not typer or click: only the chosen subcommand's module is imported, so that `--help` and
every wrong argument are answered at once. A table of modules does that in a few lines; on top of
typer the same would have to be built again.
"""

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from pipelinerl_common.errors import PipelineRLError, SettingsError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_NO_READER = 1, 2, 130, 141


COMMANDS = {
    "up": "run a job on this machine, or resume it",
    "watch": "live numbers of a run's folder, or of a job in the cluster",
    "report": "write report.html and summary.json of a run again",
    "compare": "compare runs: learning curves over time, samples and tokens",
    "doctor": "find what slows a run or a job down, and which settings to change",
    "simulate": "try staleness policies on a simulated cluster",
    "replay": "check a recorded run against its staleness policy",
    "plan": "choose how many GPUs generate, and with which batch",
    "calibrate": "measure a generator's speed by batch size, for plan",
    "eval": "pass@k of saved weights on a task, with confidence intervals",
    "new-task": "write a task and a job as a start for your own",
}
"""What each subcommand does. The module or package of the same name offers
`add_arguments(parser)` and `run(args)`, which returns the exit status.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. Exits with status 2 on wrong arguments and with 0 on --help."""
    parser = argparse.ArgumentParser(
        prog="pipelinerl",
        description="Reinforcement learning of language models where generation never stops.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            _module(name).add_arguments(subparser)
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        status: int = _module(args.command).run(args)
        sys.stdout.flush()
    except SettingsError as error:
        print(f"pipelinerl {args.command}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except PipelineRLError as error:
        print(f"pipelinerl {args.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if _has_reader():
            raise
        return EXIT_NO_READER
    return status


def _module(command: str) -> Any:
    return importlib.import_module(f"pipelinerl_cli.{command.replace('-', '_')}")


def _has_reader() -> bool:
    """Whether standard output is still read. After `pipelinerl compare ... | head` it is not, and
    the rest is discarded.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


if __name__ == "__main__":
    sys.exit(main())
