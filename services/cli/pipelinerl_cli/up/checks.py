"""Finds what would make a run fail, before anything starts, with the remedy in the message."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_actor.task import TaskName
from pipelinerl_cli.plan_memory import shape_of, weights_bytes
from pipelinerl_cli.run_folder import RunFolder
from pipelinerl_cli.up.placement import check_port_is_free, gpus_by_role, missing_gpus
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job
from pipelinerl_common.stream.layout import StreamLayout
from pipelinerl_common.stream.server import find_binary
from pipelinerl_common.text import counted
from pipelinerl_planner.memory import memory_faults

MEBIBYTE = 1 << 20
MIN_FREE_BYTES = 512 * MEBIBYTE
STORE_SHARE = 0.75
"""Share of the free disk that nats-server lets streams reserve."""
BYTES_PER_WEIGHT_BYTE = 7
"""A checkpoint of bfloat16 weights: float32 weights and two moments (6 times), and the weights
themselves.
"""
ACTOR_MODULES = ("aiohttp", "fastapi", "torch", "transformers", "uvicorn")
TRAINER_MODULES = ("deepspeed", "torch", "transformers")
TRIAL_MODULE = "pipelinerl_actor.rollout.verifier"
TRIAL_S = 30.0
"""A task that takes longer to make, since it reads much data, is left to the preparation, which
makes it once more.
"""


def check(job: Job, output: Path) -> None:
    """Raises SettingsError that lists everything that is missing or wrong."""
    problems = [
        *_packages(job),
        *_model(job),
        *_disk(job, output),
        *_stream(job, output),
        *_backend(job),
        *_port(job),
        *_gpus(job),
        *_memory(job),
    ]
    if not problems:
        problems = _task(TaskName(job.spec.task.path, job.spec.task.args, job.spec.seed))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise SettingsError(f"Fix {counted(len(problems), 'problem')} first:\n{listed}")


def _packages(job: Job) -> list[str]:
    problems = _missing(ACTOR_MODULES, "actor") + _missing(TRAINER_MODULES, "trainer")
    spec = job.spec
    sections = [each for each in (spec.reference, spec.evaluation) if each is not None]
    generators = [spec.actors.generator, *(each.generator for each in sections)]
    needs_vllm = any(each is not None and each.engine == "vllm" for each in generators)
    if needs_vllm and importlib.util.find_spec("vllm") is None:
        problems.append(
            "actors.generator.engine=vllm: vllm is not installed; install the extra 'vllm' (on a "
            "CPU run e2e/environment) or set the engine to transformers"
        )
    try:
        find_binary()
    except SettingsError as error:
        problems.append(str(error))
    return problems


def _missing(modules: Sequence[str], extra: str) -> list[str]:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if not absent:
        return []
    return [f"not installed: {', '.join(absent)}; run pip install 'pipelinerl[{extra}]'"]


def _model(job: Job) -> list[str]:
    uri = job.spec.model.uri
    scheme, is_uri, _ = uri.partition("://")
    if is_uri:
        if scheme in ("hf", "tiny"):
            return []
        return [f"model.uri={uri}: unknown scheme {scheme!r}; use a folder, hf:// or tiny://"]
    folder = Path(uri)
    if not folder.is_dir():
        return [
            f"model.uri={uri}: there is no such folder (looked in {Path.cwd()}); give a folder, "
            "hf://name or tiny://arithmetic"
        ]
    if not (folder / "config.json").is_file():
        return [
            f"model.uri={uri}: the folder has no config.json; it must be a model in Hugging Face "
            "format"
        ]
    return []


def _disk(job: Job, output: Path) -> list[str]:
    free, keep = _free_bytes(output), job.spec.trainers.checkpoint.keep
    # The optimizer of an adapter is small, but its checkpoints hold merged weights.
    share = BYTES_PER_WEIGHT_BYTE if job.spec.model.adapter is None else 1
    needed = max(MIN_FREE_BYTES, _model_bytes(job) * (1 + share * (keep + 1)))
    if free >= needed:
        return []
    return [
        f"--output {output}: {free / 1e9:.1f} GB free, about {needed / 1e9:.1f} GB needed for the "
        f"model, {counted(keep, 'checkpoint')} and the next; free some or choose another --output"
    ]


def _stream(job: Job, output: Path) -> list[str]:
    """An existing store has its reservation already."""
    free, max_bytes = _free_bytes(output), job.spec.stream.max_bytes
    reserved = StreamLayout(job.name, job.spec.stream, job.metadata.namespace).reserved_bytes
    needed, beside = reserved / STORE_SHARE, (reserved - max_bytes) / STORE_SHARE
    if RunFolder(output).stream_store.exists() or free >= needed:
        return []
    missing = f"free {(needed - free) / 1e9:.1f} GB"
    highest = int((free - beside) * STORE_SHARE) // MEBIBYTE * MEBIBYTE
    lower = f"set it to {highest} at most, {missing}"
    remedy = lower if highest >= MEBIBYTE else f"{missing} more"
    return [
        f"stream.maxBytes={max_bytes}: the streams' reservation takes {needed / 1e9:.1f} GB of "
        f"free disk, {beside / 1e9:.1f} GB of them whatever maxBytes is, and --output {output} has "
        f"{free / 1e9:.1f} GB; {remedy} or choose an --output on another disk"
    ]


def _free_bytes(output: Path) -> int:
    parents = (output, *output.absolute().parents)
    return shutil.disk_usage(next(parent for parent in parents if parent.exists())).free


def _model_bytes(job: Job) -> int:
    """Size of the weights: of the files in a local folder, or what a model of the hub will have; 0
    when nothing says.
    """
    here = sum(path.stat().st_size for path in Path(job.spec.model.uri).glob("*.safetensors"))
    return here or weights_bytes(job) or 0


def _backend(job: Job) -> list[str]:
    """Without a GPU the processes see none, and NCCL cannot form a group: the coordinator would try
    indefinitely.
    """
    if job.spec.weight_transfer.backend == "nccl" and job.spec.actors.gpus_per_replica == 0:
        return [
            "weightTransfer.backend=nccl needs GPUs, but actors.gpusPerReplica=0 runs on the CPU: "
            "set the backend to gloo, or gpusPerReplica to the GPUs of one actor"
        ]
    return []


def _memory(job: Job) -> list[str]:
    """By the memory model, for a model folder whose architecture it describes, on this machine's
    smallest GPU.
    """
    gpu_bytes = _gpu_bytes(job)
    if gpu_bytes is None:
        return []
    try:
        shape = shape_of(job, None)
    except SettingsError:
        return []  # not here yet, or not described: the processes will find out
    return memory_faults(job.spec, shape, gpu_bytes)


def _gpu_bytes(job: Job) -> int | None:
    if not gpus_by_role(job) or importlib.util.find_spec("torch") is None:
        return None
    import torch

    devices = range(torch.cuda.device_count())
    sizes = (torch.cuda.get_device_properties(index).total_memory for index in devices)
    return min(sizes, default=None)


def _gpus(job: Job) -> list[str]:
    """Counted only for a job that needs any, since PyTorch takes seconds to import."""
    if not gpus_by_role(job) or importlib.util.find_spec("torch") is None:
        return []
    import torch

    return missing_gpus(job, torch.cuda.device_count())


def _port(job: Job) -> list[str]:
    port = job.spec.weight_transfer.port
    try:
        if port:
            check_port_is_free("weightTransfer.port", port)
    except SettingsError as error:
        return [str(error)]
    return []


def _task(name: TaskName) -> list[str]:
    """Makes the task once and drops it, so that its mistakes are reported at once.

    In a process of its own, the one that runs plain verifiers: a task may import anything, and this
    process is to stay small.
    """
    path = [str(Path.cwd()), *sys.path]
    hello = {"path": name.path, "args": dict(name.args), "seed": name.seed, "sys_path": path}
    try:
        done = subprocess.run(
            [sys.executable, "-m", TRIAL_MODULE],
            input=json.dumps(hello) + "\n",
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["without a message"]
        return [
            f"spec.task.path={name.path!r}: the process that makes it ended with status "
            f"{done.returncode}: {last[0]}"
        ]
    return [answer["error"]] if "error" in answer else []
