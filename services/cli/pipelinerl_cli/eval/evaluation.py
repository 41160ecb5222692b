"""One evaluation on this machine: a generator serves the checkpoint and answers the task's prompts,
and a table shows the result.
"""

import argparse
import asyncio
import json
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
from pipelinerl_cli.run_folder import RunFolder, newest_checkpoint
from pipelinerl_cli.terminal import ProgressLine, print_table
from pipelinerl_cli.up.orphans import Guard
from pipelinerl_cli.up.placement import Ports
from pipelinerl_cli.up.process import Launcher, LocalProcess
from pipelinerl_common.checkpoints import MANIFEST, MODEL, checkpoint_folder
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import Job, TaskSettings, load_job
from pipelinerl_common.text import counted, did_you_mean_folder

GENERATOR = "generator-0-0"
GENERATOR_MODULE = "pipelinerl_actor.generator"
STOP_S = 10.0
LAST_LINES = 10


def evaluate(args: argparse.Namespace) -> int:
    """Raises SettingsError for bad input, Unavailable when the generator does not start."""
    sys.path.insert(0, str(Path.cwd()))  # where `pipelinerl up` finds a user's task
    job = load_job(args.job, args.set)
    model = find_model(args.checkpoint)
    settings = _task_settings(job, args)
    seed = job.spec.seed + 1 if args.seed is None else args.seed
    _check_model(args.checkpoint, model, job.spec.model.max_model_len)
    # The task is tried before a generator is started, which takes long.
    task = load_task(TaskName(settings.path, settings.args, seed))
    check_prompts(task, settings, job.spec.model.max_model_len, model)
    evaluation = asyncio.run(_evaluate(job, model, task, settings, seed, args))
    document = {
        "checkpoint": str(args.checkpoint),
        "model": str(model),
        "task": str(args.job),
        "seed": seed,
        **asdict(evaluation),
    }
    if args.output is not None:
        _write(args.output, document)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        _print_result(document)
    return 0


def find_model(path: Path) -> Path:
    """The Hugging Face folder that `path` is, contains as a checkpoint, or ended with as a run.

    A run's `final/` comes before its newest complete checkpoint. Raises SettingsError that lists
    what is accepted.
    """
    newest = checkpoint_folder(path, newest_checkpoint(path))
    own = [path / MODEL] if (path / MANIFEST).is_file() else []
    for folder in (path, *own, path / "final", newest / MODEL):
        if (folder / "config.json").is_file():
            return folder
    raise SettingsError(
        f"{path}: no weights here; give a folder with config.json, a checkpoint like "
        "runs/JOB/checkpoints/step-40, or a run's folder with final/ or a complete "
        f"checkpoint{did_you_mean_folder(path)}"
    )


def _check_model(given: Path, model: Path, max_model_len: int) -> None:
    try:
        check_model_folder(model, max_model_len)
    except SettingsError as error:
        raise SettingsError(f"{given}: {str(error).removeprefix('spec.model.uri: ')}") from error


def _task_settings(job: Job, args: argparse.Namespace) -> TaskSettings:
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
    job: Job, model: Path, task: Task, settings: TaskSettings, seed: int, args: argparse.Namespace
) -> Evaluation:
    """Runs a generator for as long as the evaluation takes."""
    num_done, progress = 0, ProgressLine(quiet=args.json)

    def count() -> None:
        nonlocal num_done
        num_done += 1
        progress.show(f"{num_done}/{args.prompts} prompts")

    with (
        tempfile.TemporaryDirectory(prefix="pipelinerl-eval-") as scratch,
        Guard() as guard,
        Ports() as ports,
    ):
        folder = RunFolder(Path(scratch))
        folder.make()
        folder.write_job(job)
        address = ports.address()
        url = f"http://{address}"
        flags = {
            "--job": folder.job_file,
            "--output": scratch,
            "--name": GENERATOR,
            "--listen": address,
            "--model": model,
        }
        words = (str(word) for flag in flags.items() for word in flag)
        argv = ("python", "-m", GENERATOR_MODULE, *words, "--serve-initial")
        generator = await Launcher(job, folder, guard).start(GENERATOR, argv)
        try:
            progress.show("starting the generator")
            await _until_ready(generator, url, job.spec.actors.startup_timeout_seconds)
            places = job.spec.actors.generator.max_running_requests
            pool = GeneratorPool([url], model, places)
            async with evaluator(task, settings, seed, pool, count) as evaluating:
                return await evaluating.run(range(args.prompts), args.k, seed)
        finally:
            progress.end()
            await generator.stop(STOP_S)


async def _until_ready(generator: LocalProcess, url: str, timeout_s: float) -> None:
    try:
        await until_ready(url, timeout_s, lambda: generator.exit_status is None)
    except Unavailable as error:
        raise Unavailable("\n  ".join([str(error), *generator.last_lines(LAST_LINES)])) from error


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {path}: cannot be written: {error}") from error


def _print_result(document: Mapping[str, Any]) -> None:
    prompts = counted(document["num_prompts"], "prompt")
    answers = counted(document["num_samples"], "answer")
    print(f"{document['model']} on {prompts}, {answers} each:")
    scores = {f"pass@{k}": each for k, each in document["pass_at"].items()}
    rows = [
        [name, f"{each['mean']:.3f}", f"95 % interval {each['low']:.3f} to {each['high']:.3f}"]
        for name, each in {**scores, "reward": document["reward"]}.items()
    ]
    print_table(None, rows)
    print(
        f"{document['tokens_per_answer']:.1f} tokens per answer, "
        f"{document['truncated_share']:.1%} cut off at the limit"
    )
    for reason, count in document["failures"].items():
        print(f"left out, since they failed: {counted(count, 'prompt')} {reason}")
