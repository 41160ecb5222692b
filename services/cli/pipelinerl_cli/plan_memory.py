"""`pipelinerl plan --gpu-memory`: whether a job fits its GPUs, by the memory model."""

import argparse
import json
import re
import sys
from pathlib import Path

from pipelinerl_cli.terminal import positive, print_table
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, load_job
from pipelinerl_planner.memory import (
    GIGABYTE,
    MemoryUse,
    ModelShape,
    full_sequences,
    generator_memory,
    memory_faults,
    trainer_memory,
)
from pipelinerl_weights.manifest import ITEM_BYTES

DOES_NOT_FIT = 1
_SIZE_IN_NAME = re.compile(r"(?<![\d.x])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")
"""The number of parameters in a model's name. Of a mixture ("30B-A3B") all parameters, which stand
first.
"""


def plan_memory(args: argparse.Namespace) -> int:
    """Prints what takes the memory of a GPU and what does not fit. Returns 1 when something does
    not. Raises SettingsError.
    """
    if args.job is None:
        raise SettingsError("--gpu-memory needs --job FILE, the job that is to fit")
    job = load_job(args.job)
    gpu_bytes = int(positive("--gpu-memory", args.gpu_memory) * GIGABYTE)
    shape = shape_of(job, args.model)
    faults = memory_faults(job.spec, shape, gpu_bytes)
    uses = (trainer_memory(job.spec, shape), generator_memory(job.spec, shape))
    sequences = full_sequences(job.spec, shape, gpu_bytes)
    if args.json:
        document = {
            "parameters": shape.parameters,
            "gpu_bytes": gpu_bytes,
            **{use.process: {**use.parts, "total": use.total} for use in uses},
            "full_length_sequences": sequences,
            "faults": faults,
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        _print(job, shape, uses, sequences, faults)
    return DOES_NOT_FIT if faults else 0


def weights_bytes(job: Job) -> int | None:
    """Returns the size of the job's weights in `model.dtype`: by the memory model where its
    config.json is at hand, otherwise by the size in its name ("Qwen2.5-7B"). None when neither
    says.
    """
    try:
        parameters = shape_of(job, None).parameters
    except SettingsError:
        named = _SIZE_IN_NAME.search(job.spec.model.uri.rpartition("/")[2])
        if named is None:
            return None
        number, unit = named.groups()
        parameters = int(float(number) * {"B": 1e9, "M": 1e6}[unit.upper()])
    return parameters * ITEM_BYTES[job.spec.model.dtype]


def _config_file(job: Job) -> Path:
    """The config.json of `model.uri`, for a model of the hub in the hub's cache: nothing is
    downloaded.
    """
    uri = job.spec.model.uri
    if uri.startswith("hf://"):
        from huggingface_hub import try_to_load_from_cache

        name, revision = uri.removeprefix("hf://"), job.spec.model.revision
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    return Path(uri) / "config.json"


def shape_of(job: Job, folder: Path | None) -> ModelShape:
    """Returns the sizes of the job's model, from `folder` or from `model.uri` when that is one.
    Raises SettingsError when there is no config.json to read.
    """
    file = _config_file(job) if folder is None else folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.uri={job.spec.model.uri}: {file} cannot be read ({error}); give --model FOLDER "
            "with the model's config.json"
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file}: not a mapping")
    return ModelShape.from_config(config)


def _print(
    job: Job, shape: ModelShape, uses: tuple[MemoryUse, ...], sequences: int, faults: list[str]
) -> None:
    spec = job.spec
    ranks = spec.trainers.replicas * spec.trainers.processes_per_node
    print(
        f"{shape.parameters / 1e9:.2f} billion parameters in {spec.model.dtype}; {ranks} trainer "
        f"ranks at ZeRO {spec.zero_stage}, activations "
        f"{'computed again' if spec.checkpoints_activations else 'stored'}; tensor parallel size "
        f"{spec.actors.generator.tensor_parallel_size}, weights {spec.weight_transfer.mode}\n"
    )
    for use in uses:
        rows = [(name, f"{size / GIGABYTE:.1f} GB") for name, size in use.parts.items() if size]
        print_table([use.process, ""], [*rows, ("total", f"{use.total / GIGABYTE:.1f} GB")])
        print()
    wanted = spec.actors.generator.max_running_requests
    print(
        f"the KV cache holds {sequences} sequences of model.maxModelLen={spec.model.max_model_len} "
        f"(actors.generator.maxRunningRequests={wanted})"
    )
    print("\n".join(f"does not fit: {fault}" for fault in faults) or "fits")
