"""`pipelinerl`: one command, subcommands from a table. Only the chosen subcommand's module is
imported.
"""

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pipelinerl_common.errors import PipelineRLError, SettingsError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_NO_READER = 1, 2, 130, 141


class Command(NamedTuple):
    """One subcommand. `module` offers `add_arguments(parser)` and `run(args) -> int`, the exit
    status.
    """

    summary: str
    module: str


COMMANDS: dict[str, Command] = {
    "up": Command("run a job on this machine, or go on with it", "pipelinerl_cli.up.command"),
    "watch": Command(
        "live numbers of a run's folder, or of a job in the cluster", "pipelinerl_cli.watch.command"
    ),
    "report": Command(
        "write report.html and summary.json of a run again", "pipelinerl_cli.report.command"
    ),
    "compare": Command(
        "compare runs: learning curves over time, samples and tokens",
        "pipelinerl_cli.compare.command",
    ),
    "doctor": Command(
        "find what holds a run or a job up, and what to turn", "pipelinerl_cli.doctor.command"
    ),
    "simulate": Command("try staleness policies on a simulated cluster", "pipelinerl_cli.simulate"),
    "replay": Command("check a recorded run against its staleness policy", "pipelinerl_cli.replay"),
    "plan": Command("choose how many GPUs generate, and with which batch", "pipelinerl_cli.plan"),
    "calibrate": Command(
        "measure a generator's speed by batch size, for plan", "pipelinerl_cli.calibrate.command"
    ),
    "eval": Command(
        "pass@k of saved weights on a task, with confidence intervals",
        "pipelinerl_cli.eval.command",
    ),
    "new-task": Command("write a task and a job to start your own from", "pipelinerl_cli.new_task"),
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
            importlib.import_module(command.module).add_arguments(subparser)
    args = parser.parse_args(arguments)
    try:
        status: int = importlib.import_module(COMMANDS[args.command].module).run(args)
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


def _has_reader() -> bool:
    """Whether standard output is still read; after `pipelinerl compare ... | head` it is not, and
    what is left is discarded.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


if __name__ == "__main__":
    sys.exit(main())
