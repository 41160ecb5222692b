"""The skeleton of every service: its wiring from flags, signals, exit status, and one way to run
concurrent loops.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.telemetry import LEVELS, configure_logging

log = logging.getLogger(__name__)

Result = TypeVar("Result")

EXIT_DONE, EXIT_CRASHED, EXIT_SETTINGS, EXIT_INTERRUPTED = 0, 1, 2, 130

_SHUTDOWN_S = 30.0
"""Longest time that cancelled tasks may take for their clean-up."""


@dataclass(frozen=True)
class Wiring:
    """Where a service finds its job, its peers and its output folder. Addresses are "host:port"
    unless they are URLs.
    """

    job_file: Path
    name: str
    """Name of the workload, unique in the job, for example "actor-0"."""
    output: Path
    listen: str
    nats_url: str
    preprocessor: str
    coordinator: str
    generators: tuple[str, ...]
    """Base URLs of generators, for example "http://127.0.0.1:8000"."""
    references: tuple[str, ...]
    """Base URLs of the reference model's generators."""
    token_file: Path | None
    log_level: str
    metrics_listen: str = ""
    """Address that serves `/metrics` for Prometheus; empty serves none."""
    nats_credentials: Path | None = None
    """File with the login at the sample stream's server; None uses the job's token."""
    nats_ca_file: Path | None = None
    """Certificates for a `tls://` stream server; None trusts the machine's."""

    @property
    def token(self) -> str | None:
        """The job's bearer token, or None without a token file. Raises SettingsError when the file
        is unreadable or empty.
        """
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"--token-file {self.token_file}: cannot be read: {error}"
            ) from error
        if not token:
            raise SettingsError(
                f"--token-file {self.token_file}: is empty; put the job's token in it"
            )
        return token


def program() -> str:
    """The command that has started this process, for usage texts. Example:
    "python -m pipelinerl_actor.rollout".
    """
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def parse_wiring(
    role: str,
    argv: Sequence[str] | None = None,
    own: argparse.ArgumentParser | None = None,
    **defaults: Any,
) -> Wiring:
    """Wiring from the command line. `defaults` replace the flags' defaults by their field names,
    for example listen="0.0.0.0:8000". `own` has the flags of this service only, without --help:
    they are accepted and described here, and `own.parse_known_args(argv)` then has their values.

    Exits with status 2 and a usage line on wrong flags, with 0 on --help.
    """
    parser = argparse.ArgumentParser(
        prog=program(),
        description=f"The {role} of one PipelineRL job.",
        parents=[] if own is None else [own],
        # `own` does not know what the abbreviation of a flag of the others stands for.
        allow_abbrev=False,
    )
    _add_flags(parser, role)
    parser.set_defaults(**defaults)
    flags = vars(parser.parse_args(argv))
    for repeated in ("generators", "references"):
        flags[repeated] = tuple(flags[repeated] or ())
    return Wiring(**{field.name: flags[field.name] for field in fields(Wiring)})


def _add_flags(parser: argparse.ArgumentParser, role: str) -> None:
    """Adds the flags that every service has."""
    parser.add_argument("--job", dest="job_file", type=Path, required=True, help="the job file")
    parser.add_argument("--name", default=f"{role}-0", help="workload name, unique in the job")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for the run's files")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="host:port to serve on; port 0 takes a free one"
    )
    parser.add_argument(
        "--nats-url", default="nats://127.0.0.1:4222", help="the sample stream's server"
    )
    parser.add_argument("--preprocessor", default="", help="host:port of the preprocessor")
    parser.add_argument(
        "--coordinator", default="", help="host:port of the weight-transfer coordinator"
    )
    parser.add_argument(
        "--generator",
        dest="generators",
        action="append",
        help="base URL of a generator; may be repeated",
    )
    parser.add_argument(
        "--reference",
        dest="references",
        action="append",
        help="base URL of a reference generator; may be repeated",
    )
    parser.add_argument("--token-file", type=Path, help="file with the job's bearer token")
    parser.add_argument(
        "--nats-credentials",
        type=Path,
        help="login at the sample stream's server: a NATS credentials file, or one line with "
        "user:password or a token; "
        "default: the job's token",
    )
    parser.add_argument(
        "--nats-ca-file", type=Path, help="certificates to trust a tls:// stream server by"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument(
        "--metrics-listen",
        default="",
        help="host:port to serve /metrics on; default: none",
    )


def run_service(
    main: Callable[[asyncio.Event], Awaitable[None]], *, name: str, log_level: str
) -> int:
    """Runs `main(stop)` to its end and returns the process's exit status.

    SIGTERM and SIGINT set `stop`, which `main` must heed. A second signal cancels `main`, and so
    does the first while `main` is starting: before it has waited for `stop` or looked at it. 0:
    done, or stopped as asked; 1: crashed; 2: wrong settings; 130: cancelled by a second signal.
    """
    configure_logging(name, log_level)
    try:
        return asyncio.run(_run_with_signals(main))
    except Exception as error:  # the outermost boundary: becomes the exit status
        leaves = _leaves(error)
        for leaf in leaves:
            log.error("crashed", exc_info=leaf)
        return (
            EXIT_SETTINGS
            if all(isinstance(leaf, SettingsError) for leaf in leaves)
            else EXIT_CRASHED
        )


class _Stop(asyncio.Event):
    """An event that knows whether any code has waited for it or looked at it (`is_heeded`)."""

    is_heeded = False

    def is_set(self) -> bool:
        self.is_heeded = True
        return super().is_set()

    async def wait(self) -> Literal[True]:
        self.is_heeded = True
        return await super().wait()


async def _run_with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stop, num_signals = _Stop(), 0
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(stop))

    def on_signal(received: signal.Signals) -> None:
        nonlocal num_signals
        num_signals += 1
        log.info("signal=%s stopping", received.name)
        # Code that starts up does not look at `stop` yet; only a cancellation reaches it.
        if num_signals > 1 or not stop.is_heeded:
            task.cancel()
        stop.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, on_signal, each)
    try:
        await task
    except asyncio.CancelledError as error:
        if num_signals == 0:
            raise FatalError("cancelled, though by no signal") from error
        if num_signals > 1:
            log.warning("cancelled by a second signal")
            return EXIT_INTERRUPTED
        log.info("stopped while it was starting")
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
    return EXIT_DONE


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


async def run_until_first(
    clock: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, Any]
) -> Result:
    """Runs all coroutines together until `clock`, the one that is meant to end, has ended, and
    returns its result.

    Any other one that returns or raises before is a crash: its error, or a FatalError that names
    it, is raised here. In every case the rest is cancelled and waited for (at most 30 s), so that
    nothing outlives the call.
    """
    clock_task = asyncio.ensure_future(clock)
    tasks: list[asyncio.Task[Any]] = [
        clock_task,
        *(asyncio.ensure_future(other) for other in others),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if clock_task in done:
            return clock_task.result()
        ended = next(task for task in tasks if task in done)
        ended.result()
        raise FatalError(f"{_task_name(ended)} ended while it was still needed")
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks that still run and waits for their clean-up, at most 30 s. Failures of the
    clean-up are logged, not raised.
    """
    cancelled = [task for task in tasks if task.cancel()]
    if not cancelled:
        return
    done, pending = await asyncio.wait(cancelled, timeout=_SHUTDOWN_S)
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            log.warning(
                "task=%s failed while it was shut down", _task_name(task), exc_info=task.exception()
            )
    for task in pending:
        log.error(
            "task=%s did not end within %g s of its cancellation", _task_name(task), _SHUTDOWN_S
        )


def check_cancelled(since: int = 0) -> None:
    """Raises CancelledError when the running task was cancelled more than `since` times.

    asyncio.wait_for of Python 3.11 loses a cancellation that arrives together with the result;
    loops around code that uses it (the NATS client does) call this.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > since:
        raise asyncio.CancelledError


def num_cancellations() -> int:
    """Number of cancellations of the running task so far; more than 0 in the clean-up of a
    cancelled task.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _task_name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())
