"""How the run's processes share this machine: threads and GPUs. Pure.

The job's task, made once before anything else, so that its mistakes are said at once and nothing
is left of the try.

In a process of its own, the one that runs plain verifiers: a task may import what it likes, and
this process is to stay small.

What would make a run fail later is found before anything starts, with the remedy in the message.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelinerl_actor.task import TaskName
from pipelinerl_cli.up.folder import RunFolder
from pipelinerl_cli.up.process import check_port_is_free
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job
from pipelinerl_common.stream.layout import StreamLayout
from pipelinerl_common.stream.server import find_binary
from pipelinerl_common.text import counted
from pipelinerl_control.plan import num_gpus, process_names, role_of

_COMPUTING = ("generator-", "reference-", "trainer-", "evaluator-")


def threads_per_process(job: Job, cores: int) -> int:
    """Compute threads of each generator, reference, trainer rank and evaluator, so that together
    they have about the cores.
    """
    computing = [name for name in process_names(job) if name.startswith(_COMPUTING)]
    return max(1, cores // len(computing))


def assign_gpus(job: Job, visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process: generators, references, trainer ranks, the evaluator, each
    with GPUs of its own.

    `visible` is the variable's value for this process, None when unset. A job without GPUs sees none. Example: actors with 2
    GPUs and 2 generators each, one actor, one rank: {"generator-0-0": "0", "generator-0-1": "1",
    "trainer-0": "2"}.
    """
    ids = visible.split(",") if visible else None
    assigned: dict[str, str] = {}
    taken = 0
    for name in process_names(job):
        count = num_gpus(job, name)
        own = range(taken, taken + count)
        assigned[name] = ",".join(ids[k] if ids and k < len(ids) else str(k) for k in own)
        taken += count
    return assigned


def gpus_by_role(job: Job) -> dict[str, int]:
    """GPUs of all processes of a role, of the roles that have any. Example: {"generator": 2,
    "trainer": 1}.
    """
    counts: Counter[str] = Counter()
    for name in process_names(job):
        counts[role_of(name).value] += num_gpus(job, name)
    return {role: count for role, count in counts.items() if count}


def missing_gpus(job: Job, available: int) -> list[str]:
    """The fault of a job that needs more GPUs than the machine has; empty where there are enough."""
    needed = gpus_by_role(job)
    total = sum(needed.values())
    if total <= available:
        return []
    sections = {
        "actors": job.spec.actors,
        "reference": job.spec.reference,
        "evaluation": job.spec.evaluation,
    }
    asked = [
        (name, section.gpus_per_replica)
        for name, section in sections.items()
        if section is not None
    ]
    fields = " and ".join(f"{name}.gpusPerReplica={count}" for name, count in asked if count)
    shares = ", ".join(f"{role} {count}" for role, count in needed.items())
    fewer = "lower it, or the numbers of replicas; " if available else ""
    return [
        f"{fields}: the job needs {counted(total, 'GPU')} ({shares}), this machine has {available} "
        "(as PyTorch counts them); "
        f"{fewer}gpusPerReplica=0 with weightTransfer.backend=gloo runs on the CPU"
    ]


def environment(job: Job, name: str, inherited: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of the process `name`. What the user has set for the threads is kept."""
    own = dict(inherited)
    own.setdefault("OMP_NUM_THREADS", str(threads_per_process(job, cores)))
    own.setdefault("TOKENIZERS_PARALLELISM", "false")
    own["PYTHONUNBUFFERED"] = "1"
    own["CUDA_VISIBLE_DEVICES"] = assign_gpus(job, inherited.get("CUDA_VISIBLE_DEVICES")).get(
        name, ""
    )
    return own


MODULE = "pipelinerl_actor.rollout.verifier"
TRIAL_S = 30.0
"""A task that takes longer, since it reads much data, is left to the preparation, which makes it
once more.
"""


def task_faults(name: TaskName) -> list[str]:
    """Why the task cannot be made; empty when it can, or when it takes too long to tell."""
    hello = {
        "path": name.path,
        "args": dict(name.args),
        "seed": name.seed,
        "sys_path": [str(Path.cwd()), *sys.path],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
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
        said = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return [
            f"spec.task.path={name.path!r}: the process that makes it ended with status "
            f"{done.returncode}: {said[0]}"
        ]
    return [answer["error"]] if "error" in answer else []


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
    reserved = StreamLayout(job.name, job.spec.stream, job.metadata.namespace).reserved_bytes
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
