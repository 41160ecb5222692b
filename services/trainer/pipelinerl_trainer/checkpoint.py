"""Checkpoints: folders that are complete or absent, what they hold, and how all ranks write and
read them together.

checkpoints/step-40/                complete: its manifest lists every file with its size
    model/                          the policy as a Hugging Face folder, adapters merged
    adapter/                        with `model.adapter`, in PEFT's format; training resumes on it
                                    and the prepared model
    value_head.safetensors          with `baseline: value`
    optimizer/rank-0.safetensors    each rank's float32 master weights and moments
    rng/rank-0.json                 each rank's random number generators
    manifest.json                   written last; its facts: step, policy version, ranks, ZeRO
                                    stage, element type, ledger
checkpoints/.step-60.partial/       being written, or left by a process that died; never read
"""

import base64
import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.checkpoints import MANIFEST, MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.engine import DeepSpeedEngine
from pipelinerl_trainer.export import (
    ADAPTER,
    WriteFailed,
    adapter_tensors,
    export_policy,
    load_adapter_tensors,
    save_adapter,
    save_json,
    save_tensors,
    sync,
    together,
    writing,
)
from pipelinerl_trainer.model import PolicyModel
from pipelinerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
VALUE_HEAD, OPTIMIZER, RANDOMNESS = "value_head.safetensors", "optimizer", "rng"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of the state after `step` optimizer steps, with its writer's facts."""

    folder: Path
    step: int
    facts: Mapping[str, Any]


class CheckpointStore:
    """One run's folder of checkpoints, whatever they hold. Writing methods are for rank 0 and raise
    WriteFailed.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint; incomplete ones are skipped with a warning."""
        for step in sorted(self._steps(), reverse=True):
            folder = self.path(step)
            try:
                return Checkpoint(folder, step, _read_manifest(folder, step))
            except ValueError as error:
                log.warning("checkpoint %s is not complete and is skipped: %s", folder, error)
        return None

    def begin(self, step: int) -> Path:
        """Makes the folder to write to and returns it."""
        # What a process that died had begun goes first: the disk may not hold both.
        for leftover in self.folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        with writing():
            self.partial(step).mkdir(parents=True)
        return self.partial(step)

    def partial(self, step: int) -> Path:
        """Returns the folder that rank 0 began, for all ranks to write to."""
        return self.folder / f".step-{step}.partial"

    def finish(self, step: int, facts: Mapping[str, Any]) -> None:
        """Makes all files durable and the checkpoint visible, then removes the oldest ones."""
        partial, final = self.partial(step), self.path(step)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        # Durable in this order, so that a crash at any point leaves no manifest without its files.
        sync([*files, *(path for path in partial.rglob("*") if path.is_dir())])
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        save_json(
            partial / MANIFEST,
            {"schema_version": SCHEMA_VERSION, "step": step, "files": sizes, "facts": dict(facts)},
        )
        sync([partial / MANIFEST, partial])
        with writing():
            if final.exists():  # an incomplete one of the same step
                shutil.rmtree(final)
            os.replace(partial, final)
        sync([self.folder])
        self._prune(step)

    def abandon(self, step: int) -> None:
        """Removes what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _prune(self, newest: int) -> None:
        steps = sorted((step for step in self._steps() if step <= newest), reverse=True)
        for step in steps[self._keep :]:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = [
            path.name.removeprefix("step-")
            for path in self.folder.iterdir()
            if path.name.startswith("step-")
        ]
        return [int(name) for name in names if name.isdecimal()]

    def path(self, step: int) -> Path:
        """Returns the folder of a complete checkpoint."""
        return self.folder / f"step-{step}"


def _read_manifest(folder: Path, step: int) -> Mapping[str, Any]:
    """Returns the writer's facts. Raises ValueError that says what is missing."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, files, facts = document["schema_version"], document["files"], document["facts"]
        named_step = document["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error!r}") from error
    if version != SCHEMA_VERSION or named_step != step:
        raise ValueError(
            f"{MANIFEST} is of schema {version} and step {named_step}; known is schema "
            f"{SCHEMA_VERSION}"
        )
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size}")
    return dict(facts)


class Checkpointer:
    """Writes checkpoints of a running engine. Every rank calls `save`; a failure is counted and
    training continues.
    """

    def __init__(
        self, store: CheckpointStore, engine: DeepSpeedEngine, ranks: Ranks, model_folder: Path
    ) -> None:
        self._store = store
        self._engine = engine
        self._ranks = ranks
        self._model_folder = model_folder
        self.num_failures = 0

    def save(self, step: int, ledger: batches_pb2.LedgerSnapshot | None) -> bool:
        """Writes the state after `step` optimizer steps; `ledger` is rank 0's. Returns whether it
        could be written.
        """
        # Three phases with a vote after each: no rank writes to a folder that is not there, and the
        # checkpoint becomes visible only when every rank's files are.
        for action in (
            lambda: self._begin(step, ledger),
            lambda: self._write(step),
            lambda: self._finish(step, ledger),
        ):
            if not together(
                self._ranks, action, f"the checkpoint of step {step}, older ones are intact"
            ):
                self.num_failures += 1
                if self._ranks.is_leader:
                    self._store.abandon(step)
                return False
        log.info("checkpoint=%s written", self._store.path(step))
        return True

    def _begin(self, step: int, ledger: batches_pb2.LedgerSnapshot | None) -> None:
        if not self._ranks.is_leader:
            return
        if ledger is None or ledger.num_committed_steps != step:
            have = "none" if ledger is None else f"one of step {ledger.num_committed_steps}"
            raise WriteFailed(f"there is no ledger snapshot of this step ({have})")
        folder = self._store.begin(step)
        with writing():
            for name in (MODEL, OPTIMIZER, RANDOMNESS):
                (folder / name).mkdir()

    def _write(self, step: int) -> None:
        # Collectives come first: a rank that failed before one would leave the others waiting.
        folder, rank = self._store.partial(step), self._ranks.rank
        value_head = {
            name: weight.to("cpu", copy=True) for name, weight in self._engine.value_head_weights()
        }
        adapter = adapter_tensors(self._engine)
        export_policy(self._engine, self._ranks, self._model_folder, folder / MODEL)
        if self._ranks.is_leader:
            if value_head:
                save_tensors(folder / VALUE_HEAD, value_head)
            save_adapter(self._engine, adapter, folder / ADAPTER)
        tensors = {
            name: tensor.detach().cpu() for name, tensor in self._engine.optimizer_tensors().items()
        }
        save_tensors(folder / OPTIMIZER / f"rank-{rank}.safetensors", tensors)
        save_randomness(folder / RANDOMNESS / f"rank-{rank}.json")

    def _finish(self, step: int, ledger: batches_pb2.LedgerSnapshot | None) -> None:
        if self._ranks.is_leader and ledger is not None:
            facts = layout_of(self._engine, self._ranks)
            self._store.finish(step, facts | {"ledger": json_format.MessageToDict(ledger)})


def layout_of(engine: DeepSpeedEngine, ranks: Ranks) -> dict[str, Any]:
    """Returns what must be the same for a checkpoint's optimizer shards to fit."""
    return {
        "num_ranks": ranks.num_ranks,
        "zero_stage": engine.zero_stage,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "value_head": engine.policy.value_head is not None,
        "adapter": _adapter_of(engine.policy),
    }


def _adapter_of(policy: PolicyModel) -> dict[str, Any] | None:
    return None if policy.adapter is None else policy.adapter.facts()


def load_adapter(policy: PolicyModel, checkpoint: Checkpoint) -> None:
    """Loads the adapter into the prepared model's policy, before the engine is made. Raises
    SettingsError.
    """
    if policy.adapter is None:
        return
    _refuse_other_settings(checkpoint, {"adapter": _adapter_of(policy)})
    try:
        policy.adapter.load(load_adapter_tensors(checkpoint.folder / ADAPTER))
    except (OSError, SafetensorError, ValueError) as error:
        raise SettingsError(f"{checkpoint.folder / ADAPTER}: cannot be read: {error}") from error


def load_value_head(policy: PolicyModel, checkpoint: Checkpoint) -> None:
    """Loads the value head, before the engine is made. Raises SettingsError."""
    if policy.value_head is not None and checkpoint.facts.get("value_head"):
        policy.value_head.load_state_dict(_load_tensors(checkpoint.folder / VALUE_HEAD))


def load_optimizer(engine: DeepSpeedEngine, ranks: Ranks, checkpoint: Checkpoint) -> None:
    """Loads optimizer and random state into an engine whose weights are those of the checkpoint.
    Raises SettingsError when it was written by another layout.
    """
    _refuse_other_settings(checkpoint, layout_of(engine, ranks))
    path = checkpoint.folder / OPTIMIZER / f"rank-{ranks.rank}.safetensors"
    try:
        engine.load_optimizer_tensors(_load_tensors(path))
        load_randomness(checkpoint.folder / RANDOMNESS / f"rank-{ranks.rank}.json")
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{checkpoint.folder}: cannot be read: {error}") from error


def _refuse_other_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    different = [
        f"{key} {checkpoint.facts.get(key)!r} there, {value!r} now"
        for key, value in settings.items()
        if checkpoint.facts.get(key) != value
    ]
    if different:
        raise SettingsError(
            f"{checkpoint.folder} was written with other settings: {'; '.join(different)}. "
            "Restore them, or start a new run from its model folder"
        )


def ledger_of(checkpoint: Checkpoint) -> batches_pb2.LedgerSnapshot:
    """Returns the preprocessor's ledger at the checkpoint. Raises SettingsError."""
    try:
        return json_format.ParseDict(checkpoint.facts["ledger"], batches_pb2.LedgerSnapshot())
    except (KeyError, json_format.ParseError) as error:
        raise SettingsError(
            f"{checkpoint.folder}: the ledger snapshot cannot be read: {error}"
        ) from error


def _load_tensors(path: Path) -> dict[str, Any]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def seed_everything(seed: int) -> None:
    """Seeds torch, numpy and Python, the same on every rank: ranks differ by their data, and their
    weights must start equal.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def save_randomness(path: Path) -> None:
    """Writes the state of all random number generators of this rank as JSON. Raises WriteFailed."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(each) for each in cuda],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(words), gauss],
    }
    save_json(path, state)


def load_randomness(path: Path) -> None:
    """Loads what `save_randomness` wrote. Raises OSError, or ValueError for another file."""
    state = json.loads(path.read_text(encoding="utf-8"))
    name, keys, position, has_gauss, cached = state["numpy"]
    version, words, gauss = state["python"]
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all([_decode(each) for each in state["cuda"]])
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    random.setstate((version, tuple(words), gauss))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
