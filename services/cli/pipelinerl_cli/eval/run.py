"""Which weights a path means.

One evaluation on this machine: a generator that serves the checkpoint, the task's prompts
through it, a table.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelinerl_actor.evaluation.evaluate import Evaluation
from pipelinerl_actor.evaluation.generator import evaluator, until_ready
from pipelinerl_actor.models.folder import check_model_folder
from pipelinerl_actor.prepare import check_prompts
from pipelinerl_actor.rollout.start import GeneratorPool
from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_cli.up.checks import environment
from pipelinerl_cli.up.folder import RunFolder, newest_checkpoint
from pipelinerl_cli.up.orphans import Guard
from pipelinerl_cli.up.process import LocalProcess, Ports
from pipelinerl_common.checkpoints import MANIFEST, MODEL, checkpoint_folder
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import Job, TaskSettings, load_job
from pipelinerl_common.text import counted, did_you_mean_folder


def find_model(path: Path) -> Path:
    """The Hugging Face folder that `path` is, holds as a checkpoint, or ended with as a run.

    Of a run, `final/` comes before the newest complete checkpoint. Raises SettingsError that says
    what was looked for.
    """
    newest = checkpoint_folder(path, newest_checkpoint(path)) / MODEL
    for folder in (
        path,
        path / MODEL if (path / MANIFEST).is_file() else path,
        path / "final",
        newest,
    ):
        if (folder / "config.json").is_file():
            return folder
    raise SettingsError(
        f"{path}: no weights here; give a folder with config.json, a checkpoint like "
        "runs/JOB/checkpoints/step-40, or a run's "
        f"folder with final/ or a complete checkpoint{did_you_mean_folder(path)}"
    )


GENERATOR = "generator-0-0"
_STOP_S = 10.0
_LAST_LINES = 10


def evaluate(args: argparse.Namespace) -> int:
    """Raises SettingsError for bad input, Unavailable when the generator does not come up."""
    sys.path.insert(0, str(Path.cwd()))  # where `pipelinerl up` finds a user's task
    job = load_job(args.job, args.set)
    model = find_model(args.checkpoint)
    task = _task(job, args)
    seed = job.spec.seed + 1 if args.seed is None else args.seed
    _check_model(args.checkpoint, model, job.spec.model.max_model_len)
    made = load_task(
        TaskName(task.path, task.args, seed)
    )  # before a generator is started, which takes long
    check_prompts(made, task, job.spec.model.max_model_len, model)
    evaluation = asyncio.run(_evaluate(job, model, made, task, seed, args))
    document = _document(evaluation, args, model, seed)
    if args.output is not None:
        _write(args.output, document)
    print(json.dumps(document, indent=2) if args.json else "\n".join(_table(document)))
    return 0


def _check_model(given: Path, model: Path, max_model_len: int) -> None:
    try:
        check_model_folder(model, max_model_len)
    except SettingsError as error:
        raise SettingsError(f"{given}: {str(error).removeprefix('spec.model.uri: ')}") from error


def _task(job: Job, args: argparse.Namespace) -> TaskSettings:
    """The job's task with the evaluation's number of answers and temperature."""
    num_samples = max(args.k) if args.samples is None else args.samples
    if max(args.k) > num_samples:
        raise SettingsError(
            f"--k {max(args.k)} needs at least as many --samples, not {num_samples}"
        )
    sampling = job.spec.task.sampling
    if args.temperature is not None:
        if not 0 < args.temperature <= 10:
            raise SettingsError(
                f"--temperature {args.temperature:g} must be above 0 and at most 10"
            )
        sampling = sampling.model_copy(update={"temperature": args.temperature})
    return job.spec.task.model_copy(
        update={"group_size": num_samples, "sampling": sampling, "min_group_fraction": 1.0}
    )


async def _evaluate(
    job: Job, model: Path, made: Task, task: TaskSettings, seed: int, args: argparse.Namespace
) -> Evaluation:
    progress = _Progress(args.prompts, quiet=args.json)
    with (
        tempfile.TemporaryDirectory(prefix="pipelinerl-eval-") as scratch,
        Guard() as guard,
        Ports() as ports,
    ):
        folder = RunFolder(Path(scratch))
        folder.make()
        folder.write_job(job)
        address = ports.address()
        argv = (
            "python",
            "-m",
            "pipelinerl_actor.generator",
            "--job",
            str(folder.job_file),
            "--output",
            scratch,
        )
        wiring = (
            "--name",
            GENERATOR,
            "--listen",
            address,
            "--model",
            str(model),
            "--serve-initial",
        )
        generator = await LocalProcess.start(
            GENERATOR,
            (*argv, *wiring),
            log_file=folder.log_file(GENERATOR),
            environment=environment(job, GENERATOR, os.environ, os.cpu_count() or 1),
            guard=guard,
        )
        try:
            progress.say("starting the generator")
            await _until_ready(
                generator, f"http://{address}", job.spec.actors.startup_timeout_seconds
            )
            pool = GeneratorPool(
                [f"http://{address}"], model, job.spec.actors.generator.max_running_requests
            )
            async with evaluator(made, task, seed, pool, progress.count) as evaluating:
                return await evaluating.run(range(args.prompts), args.k, seed)
        finally:
            progress.end()
            await generator.stop(_STOP_S)


async def _until_ready(generator: LocalProcess, url: str, timeout_s: float) -> None:
    try:
        await until_ready(url, timeout_s, lambda: generator.exit_status is None)
    except Unavailable as error:
        raise Unavailable("\n  ".join([str(error), *generator.last_lines(_LAST_LINES)])) from error


class _Progress:
    """A line on stderr, rewritten in place on a terminal and left out elsewhere."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._num_done = 0
        self._shows = sys.stderr.isatty() and not quiet

    def say(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def count(self) -> None:
        self._num_done += 1
        self.say(f"{self._num_done}/{self._total} prompts")

    def end(self) -> None:
        if self._shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _document(
    evaluation: Evaluation, args: argparse.Namespace, model: Path, seed: int
) -> dict[str, Any]:
    return {
        "checkpoint": str(args.checkpoint),
        "model": str(model),
        "task": str(args.job),
        "seed": seed,
        **asdict(evaluation),
    }


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {path}: cannot be written: {error}") from error


def _table(document: Mapping[str, Any]) -> list[str]:
    rows = [(f"pass@{k}", document["pass_at"][k]) for k in document["pass_at"]]
    rows.append(("reward", document["reward"]))
    lines = [
        f"{document['model']} on {counted(document['num_prompts'], 'prompt')}, "
        f"{counted(document['num_samples'], 'answer')} each:"
    ]
    lines += [
        f"  {name:<10} {each['mean']:.3f}   95 % interval {each['low']:.3f} to {each['high']:.3f}"
        for name, each in rows
    ]
    lines.append(
        f"  {document['tokens_per_answer']:.1f} tokens per answer, "
        f"{document['truncated_share']:.1%} cut off at the limit"
    )
    failures = document["failures"].items()
    lines += [
        f"  left out, since they failed: {counted(count, 'prompt')} {reason}"
        for reason, count in failures
    ]
    return lines
