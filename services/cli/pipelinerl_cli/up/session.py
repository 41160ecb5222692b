"""`pipelinerl up` around the run itself: it finds out whether the run is new, resumed or finished,
locks its folder, checks that it can start, chooses the display, and prints the result.
"""

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelinerl_cli.report.page import write_results
from pipelinerl_cli.run_folder import Resume, RunFolder, inspect
from pipelinerl_cli.up.checks import check
from pipelinerl_cli.up.display import Display, LiveDisplay, PlainDisplay
from pipelinerl_cli.up.endings import RunEnding
from pipelinerl_cli.up.local_run import Interrupt, LocalRun
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
    done, wanted = resume.steps_done, job.spec.algorithm.steps
    relation = "of" if done <= wanted else "of at least"
    print(f"{folder.root}: this run is finished ({done} {relation} {counted(wanted, 'step')})")
    print(f"report: {folder.root / 'report.html'}")
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


def print_outcome(summary: Mapping[str, Any], root: Path, failure: str | None) -> None:
    if failure is not None:
        print(f"the run failed: {failure}")
        print(f"logs: {root / 'logs'}")
    if summary["steps"]:
        print(_line(summary))
        for line in evaluation_lines(summary):
            print(line)
    if summary["status"] == "interrupted":
        print("stopped; the same command resumes the run")
    print(f"report: {root / 'report.html'}")


def _line(summary: Mapping[str, Any]) -> str:
    def shown(key: str, form: str) -> str:
        return _shown(summary[key], form)

    restarts = f", {counted(summary['restarts'], 'restart')}" if summary["restarts"] else ""
    return (
        f"{counted(summary['steps'], 'step')} in {shown('training_seconds', '.0f')} s of training, "
        f"{shown('seconds', '.0f')} s in all: "
        f"reward {shown('reward_first', '.3f')} -> {shown('reward_last', '.3f')}, "
        f"{counted(summary['weight_updates'], 'in-flight update')} "
        f"(pause {shown('pause_seconds_mean', '.3f')} s mean), "
        f"lag {shown('lag_mean', '.2f')} mean {shown('lag_max', '.0f')} max, "
        f"ESS {shown('ess_mean', '.3f')}, {shown('tokens_per_second', ',.0f')} tokens/s mean"
        f"{restarts}"
    )


def evaluation_lines(summary: Mapping[str, Any]) -> list[str]:
    """Example: "held-out: pass@1 0.210 -> 0.812 (0.766 to 0.853) at step 60"."""
    lines = []
    for name, each in summary.get("evaluation", {}).items():
        parts = []
        for k, now in each["pass_at"].items():
            before = each["first"]["pass_at"].get(k, {}).get("mean")
            began = f"{_shown(before, '.3f')} -> " if each["first"]["step"] != each["step"] else ""
            mean, low, high = (_shown(now[edge], ".3f") for edge in ("mean", "low", "high"))
            parts.append(f"pass@{k} {began}{mean} ({low} to {high})")
        lines.append(f"{name}: {', '.join(parts)} at step {each['step']}")
    return lines


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
