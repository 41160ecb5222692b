"""The state of every random number generator of a rank, as JSON.

Checkpoints as folders: complete or absent, newest first, the oldest removed. Knows nothing of
what is in them.

checkpoints/step-40/            complete: its manifest.json lists every file with its size, and they
are all there checkpoints/.step-60.partial/   being written, or left behind by a process that died;
never read

What a checkpoint holds, and how all ranks write and read it together.

model/                          the policy as a Hugging Face folder, adapters merged
adapter/                        with `model.adapter`, in PEFT's format: training goes on from it and
the prepared model value_head.safetensors          with `baseline: value`
optimizer/rank-0.safetensors    each rank's float32 master weights and moments rng/rank-0.json
each rank's random number generators manifest.json                   written last; its facts: step,
policy version, ranks, ZeRO stage, element type, ledger
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


def seed_everything(seed: int) -> None:
    """Seeds torch, numpy and Python. The same on every rank: ranks differ by their data, and their
    weights must begin equal.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def save_randomness(path: Path) -> None:
    """Raises WriteFailed."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(each) for each in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(words), gauss],
    }
    save_json(path, state)


def load_randomness(path: Path) -> None:
    """Raises OSError, or ValueError for a file that is not one of ours."""
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


log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of the state after `step` optimizer steps. `facts` is what its writer
    noted down.
    """

    folder: Path
    step: int
    facts: Mapping[str, Any]


class CheckpointStore:
    """The folder of one run. Writing methods are for rank 0 and raise WriteFailed."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The newest complete one; incomplete ones are passed over with a warning."""
        for step in sorted(self._steps(), reverse=True):
            folder = self.path(step)
            try:
                return Checkpoint(folder, step, _read_manifest(folder, step))
            except ValueError as error:
                log.warning("checkpoint %s is not complete and is passed over: %s", folder, error)
        return None

    def begin(self, step: int) -> Path:
        """An empty folder to write to. What a process that died had begun is removed first: the
        disk may not hold both.
        """
        partial = self.partial(step)
        for leftover in self.folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        with writing():
            partial.mkdir(parents=True)
        return partial

    def partial(self, step: int) -> Path:
        """The folder that rank 0 began, for the other ranks to write to."""
        return self.folder / f".step-{step}.partial"

    def finish(self, step: int, facts: Mapping[str, Any]) -> None:
        """Every file is written: makes them durable and the checkpoint visible, then removes the
        oldest.
        """
        partial, final = self.partial(step), self.path(step)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sync([*files, *(path for path in partial.rglob("*") if path.is_dir())])
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        save_json(
            partial / MANIFEST,
            {"schema_version": SCHEMA_VERSION, "step": step, "files": sizes, "facts": dict(facts)},
        )
        sync([partial / MANIFEST, partial])
        with writing():
            if final.exists():  # a torn one of the same step
                shutil.rmtree(final)
            os.replace(partial, final)
        sync([self.folder])
        self._prune(step)

    def abandon(self, step: int) -> None:
        """Removes what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _prune(self, newest: int) -> None:
        for step in sorted((step for step in self._steps() if step <= newest), reverse=True)[
            self._keep :
        ]:
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
        """Of a complete checkpoint."""
        return self.folder / f"step-{step}"


def _read_manifest(folder: Path, step: int) -> Mapping[str, Any]:
    """The writer's facts. Raises ValueError that says what is missing."""
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
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise ValueError(
                f"{name} has {actual} bytes, not {size}"
                if actual is not None
                else f"{name} is missing"
            )
    return dict(facts)


VALUE_HEAD, OPTIMIZER, RANDOMNESS = "value_head.safetensors", "optimizer", "rng"


class Checkpointer:
    """Writes checkpoints of a running engine. Every rank calls `save`; a failure is counted and
    training goes on.
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
        """The state after `step` optimizer steps. `ledger` is rank 0's. False when it could not be
        written.
        """
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
        """Collectives come first and are finished on every rank before anything can fail there."""
        folder, rank = self._store.partial(step), self._ranks.rank
        value_head = {
            name: weight.to("cpu", copy=True) for name, weight in self._engine.value_head_weights()
        }
        adapter = adapter_tensors(self._engine)
        export_policy(self._engine, self._ranks, self._model_folder, folder / MODEL)
        if self._ranks.is_leader and value_head:
            save_tensors(folder / VALUE_HEAD, value_head)
        if self._ranks.is_leader:
            save_adapter(self._engine, adapter, folder / ADAPTER)
        tensors = {
            name: tensor.detach().cpu() for name, tensor in self._engine.optimizer_tensors().items()
        }
        save_tensors(folder / OPTIMIZER / f"rank-{rank}.safetensors", tensors)
        save_randomness(folder / RANDOMNESS / f"rank-{rank}.json")

    def _finish(self, step: int, ledger: batches_pb2.LedgerSnapshot | None) -> None:
        if self._ranks.is_leader and ledger is not None:
            self._store.finish(
                step,
                layout_of(self._engine, self._ranks)
                | {"ledger": json_format.MessageToDict(ledger)},
            )


def layout_of(engine: DeepSpeedEngine, ranks: Ranks) -> dict[str, Any]:
    """What must be the same for a checkpoint's optimizer shards to fit."""
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
    """Before the engine is made, into the prepared model's policy. Raises SettingsError."""
    if policy.adapter is None:
        return
    _refuse_other_settings(checkpoint, {"adapter": _adapter_of(policy)})
    try:
        policy.adapter.load(load_adapter_tensors(checkpoint.folder / ADAPTER))
    except (OSError, SafetensorError, ValueError) as error:
        raise SettingsError(f"{checkpoint.folder / ADAPTER}: cannot be read: {error}") from error


def load_value_head(policy: PolicyModel, checkpoint: Checkpoint) -> None:
    """Before the engine is made. Raises SettingsError."""
    if policy.value_head is not None and checkpoint.facts.get("value_head"):
        policy.value_head.load_state_dict(_load_tensors(checkpoint.folder / VALUE_HEAD))


def load_optimizer(engine: DeepSpeedEngine, ranks: Ranks, checkpoint: Checkpoint) -> None:
    """Into an engine whose weights are those of the checkpoint. Raises SettingsError when it was
    written by another layout.
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
    """Raises SettingsError."""
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
