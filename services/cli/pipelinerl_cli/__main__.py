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
from typing import Any, NamedTuple

from pipelinerl_common.errors import PipelineRLError, SettingsError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_NO_READER = 1, 2, 130, 141


class Command(NamedTuple):
    """One subcommand. `module` offers `add_arguments(parser)` and `run(args)`, which returns the
    exit status.
    """

    summary: str
    module: str


COMMANDS: dict[str, Command] = {
    "up": Command("run a job on this machine, or resume it", "up.command"),
    "watch": Command("live numbers of a run's folder, or of a job in the cluster", "watch.command"),
    "report": Command("write report.html and summary.json of a run again", "report.command"),
    "compare": Command(
        "compare runs: learning curves over time, samples and tokens", "compare.command"
    ),
    "doctor": Command(
        "find what slows a run or a job down, and which settings to change", "doctor.command"
    ),
    "simulate": Command("try staleness policies on a simulated cluster", "simulate"),
    "replay": Command("check a recorded run against its staleness policy", "replay"),
    "plan": Command("choose how many GPUs generate, and with which batch", "plan"),
    "calibrate": Command(
        "measure a generator's speed by batch size, for plan", "calibrate.command"
    ),
    "eval": Command("pass@k of saved weights on a task, with confidence intervals", "eval.command"),
    "new-task": Command("write a task and a job as a start for your own", "new_task"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pipelinerl",
        description="Reinforcement learning of language models where generation never stops.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        if name == chosen:
            _module(name).add_arguments(subparser)
    args = parser.parse_args(arguments)
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
    return importlib.import_module(f"pipelinerl_cli.{COMMANDS[command].module}")


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
