"""Export of the policy as a Hugging Face folder that transformers and vLLM load: safetensors,
configuration, tokenizer.

Adapters are merged into its weights; alone they are a folder of their own in PEFT's format.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelinerl_common.errors import FatalError
from pipelinerl_trainer.engine import DeepSpeedEngine, chunks
from pipelinerl_trainer.ranks import Ranks, Vote

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Folder of the adapter, inside the exported model or beside a checkpoint's model."""

SHARD_BYTES = 4 << 30
"""Largest file, unless a single tensor is larger; also the host memory that an export needs."""

_ADAPTER_WEIGHTS, _ADAPTER_CONFIG, _PEFT_PREFIX = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "base_model.model.",
)

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
)


class WriteFailed(Exception):
    """A file could not be written, as on a full disk."""


def export_policy(
    engine: DeepSpeedEngine,
    ranks: Ranks,
    source: Path,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the weights to `target` (which exists), with everything but the weights copied from
    the model folder `source`.

    Every rank must call it; rank 0 writes and raises WriteFailed, after all ranks' collectives.
    """
    shards = _shards(engine, shard_bytes)
    weights, failure = engine.model_weights(), None
    for file, names in shards.items():
        shard: dict[str, Tensor] = {}
        for name, weight in islice(weights, len(names)):
            if ranks.is_leader and failure is None:
                shard[name] = weight.to("cpu", copy=True).contiguous()
        if shard:
            try:
                save_tensors(target / file, shard)
            except WriteFailed as error:
                failure = error  # raised at the end: the other ranks still gather with this one
    for _ in weights:  # exhausted, so that the last gathered weights are released
        pass
    if failure is not None:
        raise failure
    if ranks.is_leader:
        if len(shards) > 1:
            _save_index(target, shards, engine)
        _copy_other_files(source, target, str(engine.dtype).removeprefix("torch."))


def adapter_tensors(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Returns copies of the adapter on the host, if there is one. Every rank must call it."""
    if engine.policy.adapter is None:
        return {}
    return {name: weight.to("cpu", copy=True) for name, weight in engine.served_weights()}


def save_adapter(engine: DeepSpeedEngine, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Writes `adapter_tensors`, if there are any, to the new folder `target` as
    `peft.PeftModel.from_pretrained` loads them. Called on rank 0; raises WriteFailed.
    """
    if engine.policy.adapter is None:
        return
    with writing():
        target.mkdir()
    save_tensors(
        target / _ADAPTER_WEIGHTS,
        {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()},
    )
    save_json(target / _ADAPTER_CONFIG, engine.policy.adapter.peft_config())


def load_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns what `save_adapter` wrote, by the names on the wire. Raises OSError or
    SafetensorError.
    """
    return {
        name.removeprefix(_PEFT_PREFIX): tensor
        for name, tensor in load_file(folder / _ADAPTER_WEIGHTS).items()
    }


def export_final(engine: DeepSpeedEngine, ranks: Ranks, source: Path, target: Path) -> None:
    """Writes the policy to `target`, which appears as a whole or not at all, in place of an older
    one, and its adapter to a folder in it. Raises FatalError on every rank when it cannot.
    """
    partial = target.with_name(f".{target.name}.partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        sync([*partial.rglob("*"), partial])
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)

    def by_leader(action: Callable[[], None]) -> None:
        with writing():
            if ranks.is_leader:
                action()

    def write() -> None:
        adapter = adapter_tensors(engine)  # a collective: before anything can fail on one rank
        export_policy(engine, ranks, source, partial)
        if ranks.is_leader:
            save_adapter(engine, adapter, partial / ADAPTER)

    for action in (lambda: by_leader(begin), write, lambda: by_leader(finish)):
        if not together(ranks, action, f"the export to {target}"):
            raise FatalError(
                f"the trained model could not be written to {target}: start with --resume to try "
                "again"
            )


def together(ranks: Ranks, action: Callable[[], None], what: str) -> bool:
    """Runs `action` on every rank and returns whether it raised WriteFailed on none of them."""
    vote = Vote.READY
    try:
        action()
    except WriteFailed as error:
        log.error("alert=write_failed %s: %s", what, error)
        vote = Vote.FAILED
    return ranks.vote(vote) is Vote.READY


def _shards(engine: DeepSpeedEngine, shard_bytes: int) -> dict[str, list[str]]:
    """Returns tensor names by file name, in the engine's order."""
    sizes = _sizes(engine)
    groups = list(chunks(sizes, sizes.__getitem__, shard_bytes))
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{index:05d}-of-{len(groups):05d}.safetensors": names
        for index, names in enumerate(groups, start=1)
    }


def _sizes(engine: DeepSpeedEngine) -> dict[str, int]:
    """Returns the bytes of each tensor of the model."""
    item_bytes = engine.dtype.itemsize
    return {name: item_bytes * math.prod(shape) for name, shape in engine.model_shapes.items()}


def _save_index(folder: Path, shards: Mapping[str, list[str]], engine: DeepSpeedEngine) -> None:
    index = {
        "metadata": {"total_size": sum(_sizes(engine).values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    save_json(folder / "model.safetensors.index.json", index)


def _copy_other_files(source: Path, target: Path, dtype: str) -> None:
    with writing():
        for file in sorted(source.iterdir()):
            if (
                file.is_file()
                and not file.name.endswith(_WEIGHT_SUFFIXES)
                and not file.name.startswith(".")
            ):
                shutil.copyfile(file, target / file.name)
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        save_json(target / "config.json", config | {"dtype": dtype})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file. Raises WriteFailed."""
    with writing():
        save_file(dict(tensors), path, metadata={"format": "pt"})


def save_json(path: Path, document: Any) -> None:
    """Writes a JSON file. Raises WriteFailed."""
    with writing():
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing() -> Iterator[None]:
    """Translates what the file system and safetensors raise into WriteFailed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteFailed(str(error)) from error


def sync(paths: Iterable[Path]) -> None:
    """Makes files and folders durable. Raises WriteFailed."""
    with writing():
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
