"""What a checkpoint holds, and how all ranks write and read it together.

model/                          the policy as a Hugging Face folder, adapters merged
adapter/                        with `model.adapter`, in PEFT's format: training goes on from it and
the prepared model value_head.safetensors          with `baseline: value`
optimizer/rank-0.safetensors    each rank's float32 master weights and moments rng/rank-0.json
each rank's random number generators manifest.json                   written last; its facts: step,
policy version, ranks, ZeRO stage, element type, ledger
"""

import logging
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file

from pipelinerl.v1 import batches_pb2
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.checkpoint_store import Checkpoint, CheckpointStore
from pipelinerl_trainer.engine import Engine
from pipelinerl_trainer.export import (
    ADAPTER,
    WriteFailed,
    adapter_tensors,
    export_policy,
    load_adapter_tensors,
    save_adapter,
    save_tensors,
    together,
    writing,
)
from pipelinerl_trainer.model import PolicyModel
from pipelinerl_trainer.randomness import load_randomness, save_randomness
from pipelinerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)

VALUE_HEAD, OPTIMIZER, RANDOMNESS = "value_head.safetensors", "optimizer", "rng"


class Checkpointer:
    """Writes checkpoints of a running engine. Every rank calls `save`; a failure is counted and
    training goes on.
    """

    def __init__(
        self, store: CheckpointStore, engine: Engine, ranks: Ranks, model_folder: Path
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


def layout_of(engine: Engine, ranks: Ranks) -> dict[str, Any]:
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


def load_optimizer(engine: Engine, ranks: Ranks, checkpoint: Checkpoint) -> None:
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
