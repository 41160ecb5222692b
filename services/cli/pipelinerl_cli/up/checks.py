"""What would make a run fail later is found before anything starts, with the remedy in the message."""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_actor.task import TaskName
from pipelinerl_cli.up.folder import RunFolder
from pipelinerl_cli.up.machine import gpus_by_role, missing_gpus
from pipelinerl_cli.up.ports import check_port_is_free
from pipelinerl_cli.up.task_trial import task_faults
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job
from pipelinerl_common.stream.layout import Layout
from pipelinerl_common.stream.server import find_binary
from pipelinerl_common.words import counted

MEBIBYTE = 1 << 20
MIN_FREE_BYTES = 512 * MEBIBYTE
STORE_SHARE = 0.75
"""Of the free disk, what nats-server lets streams reserve."""
BYTES_PER_WEIGHT_BYTE = 7
"""A checkpoint of bfloat16 weights: float32 weights and two moments (6 times), and the weights
themselves.
"""

ACTOR_MODULES = ("aiohttp", "fastapi", "torch", "transformers", "uvicorn")
TRAINER_MODULES = ("deepspeed", "torch", "transformers")


def check(job: Job, output: Path) -> None:
    """Raises SettingsError that lists everything that is missing or wrong."""
    faults = [
        *_packages(job),
        *_model(job),
        *_disk(job, output),
        *_stream(job, output),
        *_backend(job),
        *_port(job),
    ]
    faults += _gpus(job)
    faults = faults or task_faults(TaskName(job.spec.task.path, job.spec.task.args, job.spec.seed))
    if faults:
        raise SettingsError(
            "\n".join(
                [
                    f"{counted(len(faults), 'thing')} to put right first:",
                    *(f"  {fault}" for fault in faults),
                ]
            )
        )


def _packages(job: Job) -> list[str]:
    faults = _missing(ACTOR_MODULES, "actor") + _missing(TRAINER_MODULES, "trainer")
    others = [
        section.generator
        for section in (job.spec.reference, job.spec.evaluation)
        if section is not None
    ]
    settings = [each for each in (job.spec.actors.generator, *others) if each is not None]
    if any(each.engine == "vllm" for each in settings) and importlib.util.find_spec("vllm") is None:
        faults.append(
            "actors.generator.engine=vllm: vllm is not installed; install the extra 'vllm' (on a "
            "CPU run e2e/environment) "
            "or set the engine to transformers"
        )
    try:
        find_binary()
    except SettingsError as error:
        faults.append(str(error))
    return faults


def _missing(modules: Sequence[str], extra: str) -> list[str]:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    return (
        [f"not installed: {', '.join(absent)}; run pip install 'pipelinerl[{extra}]'"]
        if absent
        else []
    )


def _model(job: Job) -> list[str]:
    uri = job.spec.model.uri
    if "://" in uri:
        scheme = uri.partition("://")[0]
        return (
            []
            if scheme in ("hf", "tiny")
            else [f"model.uri={uri}: unknown scheme {scheme!r}; use a folder, hf:// or tiny://"]
        )
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
    free = _free_bytes(output)
    needed = max(
        MIN_FREE_BYTES,
        _model_bytes(job) * (1 + BYTES_PER_WEIGHT_BYTE * (job.spec.trainers.checkpoint.keep + 1)),
    )
    if free >= needed:
        return []
    return [
        f"--output {output}: {free / 1e9:.1f} GB free, about {needed / 1e9:.1f} GB needed for the "
        "model, "
        f"{counted(job.spec.trainers.checkpoint.keep, 'checkpoint')} and the next; free some or "
        "choose another --output"
    ]


def _stream(job: Job, output: Path) -> list[str]:
    """A store that is there already has its reservation."""
    free, max_bytes = _free_bytes(output), job.spec.stream.max_bytes
    reserved = Layout(job.name, job.spec.stream, job.metadata.namespace).reserved_bytes
    needed, beside = reserved / STORE_SHARE, (reserved - max_bytes) / STORE_SHARE
    if RunFolder(output).stream_store.exists() or free >= needed:
        return []
    highest = int((free - beside) * STORE_SHARE) >> 20 << 20
    lower = f"set it to {highest} at most, " if highest >= MEBIBYTE else ""
    return [
        f"stream.maxBytes={max_bytes}: the streams' reservation takes {needed / 1e9:.1f} GB of "
        "free disk, "
        f"{beside / 1e9:.1f} GB of them whatever maxBytes is, and --output {output} has "
        f"{free / 1e9:.1f} GB; {lower}free "
        f"{(needed - free) / 1e9:.1f} GB{' more' if not lower else ''} or choose an --output on "
        "another disk"
    ]


def _free_bytes(output: Path) -> int:
    return shutil.disk_usage(
        next(parent for parent in (output, *output.absolute().parents) if parent.exists())
    ).free


def _model_bytes(job: Job) -> int:
    folder = Path(job.spec.model.uri)
    return (
        sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    )


def _backend(job: Job) -> list[str]:
    """Without a GPU the processes see none, and NCCL cannot form a group: generators would be asked
    again for ever.
    """
    if job.spec.weight_transfer.backend == "nccl" and job.spec.actors.gpus_per_replica == 0:
        return [
            "weightTransfer.backend=nccl needs GPUs, but actors.gpusPerReplica=0 runs on the CPU: "
            "set the backend to gloo, or gpusPerReplica to the GPUs of one actor"
        ]
    return []


def _gpus(job: Job) -> list[str]:
    """They are counted where the job needs any, since PyTorch takes seconds to import."""
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
