"""`pipelinerl up` around the run itself: which run it is, whether it can start, and what is printed
at the end.
"""

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipelinerl_cli.report.page import write_results
from pipelinerl_cli.runs.summary import print_outcome
from pipelinerl_cli.up.checks import check
from pipelinerl_cli.up.display import Display, LiveDisplay, PlainDisplay
from pipelinerl_cli.up.endings import RunEnding
from pipelinerl_cli.up.folder import Resume, RunFolder, inspect
from pipelinerl_cli.up.run import Interrupt, LocalRun
from pipelinerl_cli.up.status_lines import is_evaluated
from pipelinerl_common.settings import Job, cluster_only_paths, load_job
from pipelinerl_common.text import counted

EXIT_FINISHED, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_SIGNAL = 0, 1, 2, 128


def up(job_file: Path, *, output: Path | None, overrides: Sequence[str], fresh: bool) -> int:
    """Runs the job, or resumes it, and returns the exit status. Raises SettingsError before
    anything is started.
    """
    job = load_job(job_file, overrides)
    if ignored := cluster_only_paths(job.spec):
        print(f"only Kubernetes reads {', '.join(ignored)}: ignored here")
    folder = RunFolder((output or Path("runs") / job.name).absolute())
    with ExitStack() as stack:
        # Held before the folder is looked at: another `up` must not change it meanwhile.
        if folder.root.is_dir():
            stack.enter_context(folder.locked())
        if fresh and (old := folder.move_aside()) is not None:
            print(f"the old run is now in {old}")
        resume = inspect(folder, job)
        if resume is not None and _is_finished(resume, job, folder):
            _print_finished(folder, resume, job)
            return EXIT_FINISHED
        check(job, folder.root)
        if not folder.root.is_dir():
            folder.make()
            stack.enter_context(folder.locked())
        folder.make()
        if resume is not None:
            _print_resumed(folder, resume, job)
        folder.write_job(job)
        return _run_and_report(job, folder, is_new=resume is None)


def _run_and_report(job: Job, folder: RunFolder, *, is_new: bool) -> int:
    ending, interrupt = asyncio.run(_run(job, folder))
    status = _exit_status(ending, interrupt)
    if ending.never_began and is_new:
        folder.discard()
        print(f"nothing was started, and no {folder.root} is left: {ending.failure}")
        return status
    cause = ending.failure.cause if ending.failure else ""
    try:
        summary = write_results(folder.root, job, ending.status, cause)
    except OSError as error:
        print(f"the run has {ending.status}{f': {ending.failure}' if ending.failure else ''}")
        print(
            f"summary and report cannot be written: {error}; once that is fixed: pipelinerl report "
            f"{folder.root}"
        )
        return status or EXIT_FAILED
    print_outcome(summary, folder.root, str(ending.failure) if ending.failure else None)
    return status


async def _run(job: Job, folder: RunFolder) -> tuple[RunEnding, Interrupt]:
    interrupt = Interrupt()
    interrupt.install()
    with ExitStack() as stack:
        display: Display = PlainDisplay()
        if sys.stdout.isatty():
            display = stack.enter_context(LiveDisplay(job.name, str(folder.root)))
        stack.enter_context(keep_log(folder.log_file("up"), display))
        return await LocalRun(job, folder, display, interrupt).run(), interrupt


def _exit_status(ending: RunEnding, interrupt: Interrupt) -> int:
    if ending.status == "finished":
        return EXIT_FINISHED
    if ending.failure is not None:
        return EXIT_BAD_INPUT if ending.failure.bad_input else EXIT_FAILED
    return EXIT_SIGNAL + interrupt.first if interrupt.first is not None else EXIT_FAILED


def _is_finished(resume: Resume, job: Job, folder: RunFolder) -> bool:
    return resume.steps_done >= job.spec.algorithm.steps and is_evaluated(job, folder.root)


def _print_finished(folder: RunFolder, resume: Resume, job: Job) -> None:
    steps = counted(job.spec.algorithm.steps, "step")
    print(f"{folder.root}: this run is finished ({resume.steps_done} of {steps})")
    print(f"report: {folder.report_file}")
    print("a larger --max-steps continues it, --fresh starts over")


def _print_resumed(folder: RunFolder, resume: Resume, job: Job) -> None:
    print(
        f"resuming the run in {folder.root} after step {resume.steps_done} of "
        f"{job.spec.algorithm.steps}"
    )
    for change in resume.changed:
        print(f"  changed: {change}")


class _ToDisplay(logging.Handler):
    """Shows warnings to the user."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.note(record.getMessage())


class _ToFile(logging.FileHandler):
    """This process's own log."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a full disk: the run continues, and the terminal is no place for the log."""


@contextmanager
def keep_log(log_file: Path, display: Display) -> Iterator[None]:
    """Writes this process's log, and shows its user the warnings of `pipelinerl up` itself, such as
    restarts.
    """
    to_file = _ToFile(log_file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    to_display = _ToDisplay(display)
    root, own = logging.getLogger(), logging.getLogger("pipelinerl_cli.up")
    root.setLevel(logging.INFO)
    root.addHandler(to_file)
    own.addHandler(to_display)
    try:
        yield
    finally:
        own.removeHandler(to_display)
        root.removeHandler(to_file)
        with suppress(OSError):
            to_file.close()
