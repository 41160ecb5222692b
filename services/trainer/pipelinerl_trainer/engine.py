"""DeepSpeed as this trainer uses it: one optimizer step over any number of micro-batches, with an
exact gradient.

What DeepSpeed does to a loss, and how it is undone here:
- It divides by `gradient_accumulation_steps`: that is 1, and the boundary is set by hand at the
  last micro-batch.
- It averages gradients over ranks: the loss is multiplied by the number of ranks, so that the
  gradient is the sum over all ranks and micro-batches. The caller's loss is already divided by the
  whole step's normaliser. Ranks that share a row each have its whole loss and the gradient through
  their own slice, so the sum is right for them too. ZeRO partitions over all ranks.
- It skips a step whose gradient is not finite and clears the gradient: `apply` reports that.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipelinerl_common.settings import OptimizerSettings
from pipelinerl_trainer.model import PolicyModel
from pipelinerl_trainer.optimizer import LAG, make_optimizer
from pipelinerl_trainer.packed import PackedRow
from pipelinerl_trainer.ranks import Ranks, cuda_index
from pipelinerl_trainer.scoring import TokenScores

log = logging.getLogger(__name__)

Item = TypeVar("Item")
NamedParameter = tuple[str, nn.Parameter]

_GATHER_BYTES = 256 << 20
"""ZeRO-3 gathers parameters this many bytes at a time, so that small ones share a collective."""


COLLECTIVE_WARNING = r"`torch\.distributed\..*` is deprecated"
"""DeepSpeed calls collectives by names that this torch deprecates."""


def prepare_environment(local_rank: int, rank: int, num_ranks: int) -> None:
    """Sets the environment variables that DeepSpeed reads; called once at the entry point, before
    DeepSpeed is imported.

    Nothing is compiled: the only operator that a CPU run would build is a shared-memory all-reduce
    for inference.
    """
    os.environ |= {
        "LOCAL_RANK": str(cuda_index(local_rank)),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
    }
    os.environ |= {"DS_BUILD_OPS": "0", "DEEPSPEED_LOG_LEVEL": "warning"}
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.ops
    deepspeed.ops.__compatible_ops__ = {}
    warnings.filterwarnings("ignore", message=COLLECTIVE_WARNING, category=FutureWarning)
    its_log = logging.getLogger("DeepSpeed")
    its_log.handlers.clear()
    its_log.propagate = True
    its_log.setLevel(logging.ERROR)  # the learner reports a skipped step


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of an optimizer step."""

    applied: bool
    """False when the gradient was not finite, so that the weights are unchanged."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping; inf when not applied."""


class DeepSpeedEngine:
    """The policy under DeepSpeed ZeRO 1, 2 or 3. Every method must be called by every rank, in the
    same order.
    """

    def __init__(
        self,
        policy: PolicyModel,
        ranks: Ranks,
        zero_stage: int,
        settings: OptimizerSettings,
        delay_compensation: float = 0.0,
    ) -> None:
        self._ranks = ranks
        self.zero_stage = zero_stage
        self.policy = policy.to(ranks.device)
        self.dtype: torch.dtype = next(policy.parameters()).dtype
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in policy.model_parameters()
        }
        self._model_shapes = dict(
            pair for item in self._shapes.items() for pair in policy.tensors.shapes_of(*item)
        )
        adapted = () if policy.adapter is None else policy.adapter.parameters()
        self._adapter_shapes = {name: tuple(parameter.shape) for name, parameter in adapted}
        self._engine, self._optimizer = _initialize(
            self.policy, zero_stage, self.dtype, settings, delay_compensation
        )
        if zero_stage == 3:
            self._register_head()

    def _register_head(self) -> None:
        from deepspeed.runtime.zero import register_external_parameter

        for parameter in self.policy.token_head.parameters_used:
            register_external_parameter(self.policy.token_head, parameter)

    def score(self, row: PackedRow, *, entropy_gradient: bool = False) -> TokenScores:
        """Forward with gradient."""
        scores: TokenScores = self._engine(row, entropy_gradient)
        return scores

    @torch.no_grad()
    def score_only(self, row: PackedRow) -> TokenScores:
        """Forward without gradient."""
        self._engine.eval()
        scores: TokenScores = self._engine(row)
        self._engine.train()
        return scores

    def accumulate(self, loss: Tensor, *, is_last: bool) -> None:
        """Runs backward for one micro-batch. `loss` is its share of the step's loss; `is_last`
        marks the step's last one.
        """
        # An infinite loss may have finite gradients: as NaN it makes every rank skip the step.
        if not bool(torch.isfinite(loss)):
            loss = loss * float("nan")
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._ranks.num_ranks)

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient of a step whose last micro-batch is accumulated; each rank scales
        what it holds.
        """
        for gradient in self._gradients():
            gradient.mul_(factor)

    def apply(self, learning_rate: float, lag: float = 0.0) -> StepOutcome:
        """Clips and applies the accumulated gradient. `lag` is its tokens' mean lag, for an
        optimizer that uses it.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            if LAG in group:
                group[LAG] = lag
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return StepOutcome(
            bool(self._engine.was_step_applied()), float("inf") if norm is None else float(norm)
        )

    def weights_are_finite(self) -> bool:
        """Returns whether the trained weights are finite on all ranks; the same answer on every
        rank.
        """
        mine = all(bool(torch.isfinite(master.sum())) for master in self._masters())
        return bool(self._ranks.gather([float(mine)]).all())

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of the model by the checkpoint's names, in the order of `model_weights`."""
        return self._model_shapes

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights by the checkpoint's names, adapters merged into them; each is valid
        until the next one. Every rank must exhaust the iterator.
        """
        adapter = self.policy.adapter
        for members in self._chunks(self.policy.model_parameters(), self._shapes):
            parts = (
                []
                if adapter is None
                else [part for name, _ in members for part in adapter.parts_of(name)]
            )
            with self._gathered([*(parameter for _, parameter in members), *parts]):
                for name, parameter in members:
                    weight = (
                        parameter.detach()
                        if adapter is None
                        else adapter.merged(name, parameter.detach())
                    )
                    yield from self.policy.tensors.of(name, weight)

    @property
    def served_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of what `served_weights` yields, in its order."""
        return self._model_shapes if self.policy.adapter is None else self._adapter_shapes

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what generators need: `model_weights`, or the adapter alone, because they have the
        rest from the model folder.
        """
        adapter = self.policy.adapter
        if adapter is None:
            yield from self.model_weights()
            return
        for members in self._chunks(adapter.parameters(), self._adapter_shapes):
            with self._gathered([parameter for _, parameter in members]):
                for name, parameter in members:
                    yield name, parameter.detach()

    def served_ranges(self) -> dict[str, list[tuple[str, int]] | None]:
        """Returns, by the name of each parameter that is served, its tensors in the order of
        `served_shapes` and where each begins in the flat parameter; None for a parameter that has
        to be whole for its tensors to be made.
        """
        if self.policy.adapter is not None:
            return {name: [(name, 0)] for name in self._adapter_shapes}
        tensors = self.policy.tensors
        return {name: tensors.ranges_of(name, shape) for name, shape in self._shapes.items()}

    def stored_shapes(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields names and shapes of the stored tensors of one parameter of the model."""
        return self.policy.tensors.shapes_of(name, self._shapes[name])

    def partitions(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields, under ZeRO-3, every served parameter's name, this rank's flat partition of it,
        whose end may be padding, and the item at which the partition begins. Nothing is gathered.
        """
        adapter = self.policy.adapter
        served = self.policy.model_parameters() if adapter is None else adapter.parameters()
        for name, parameter in served:
            partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined] # DeepSpeed's
            yield name, partition.detach().view(-1), self._ranks.rank * partition.numel()

    def gathered(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors of the named parameters, whole; each is valid until the next
        one. Every rank must exhaust the iterator.
        """
        wanted = frozenset(names)
        chosen = ((name, each) for name, each in self.policy.model_parameters() if name in wanted)
        for members in self._chunks(chosen, self._shapes):
            with self._gathered([parameter for _, parameter in members]):
                for name, parameter in members:
                    yield from self.policy.tensors.of(name, parameter.detach())

    def value_head_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the value head's weights like `served_weights`, if there is a value head."""
        head = self.policy.value_head
        if head is not None:
            with self._gathered(list(head.parameters())):
                for name, parameter in head.named_parameters():
                    yield name, parameter.detach()

    def _chunks(
        self, parameters: Iterable[NamedParameter], shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[list[NamedParameter]]:
        """Yields parameters in groups that are gathered together."""

        # By the full shapes: under ZeRO-3 a parameter that is not gathered is empty.
        def num_bytes(named: NamedParameter) -> int:
            return self.dtype.itemsize * math.prod(shapes[named[0]])

        return chunks(parameters, num_bytes, _GATHER_BYTES)

    def _gathered(self, parameters: list[nn.Parameter]) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(parameters, enabled=self.zero_stage == 3)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns this rank's share of the optimizer: flat float32 master weights and moments, as
        views.
        """
        tensors: dict[str, Tensor] = {}
        for index, master in enumerate(self._masters()):
            tensors[f"{index}.master"] = master
            for key, value in self._optimizer.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{index}.{key}"] = value
        return tensors

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Loads what `optimizer_tensors` returned, in an engine of the same layout whose weights
        are already those of the checkpoint. Raises ValueError that names the first tensor which is
        missing or of another size.
        """
        for index, master in enumerate(self._masters()):
            saved = {
                key.partition(".")[2]: value
                for key, value in tensors.items()
                if key.partition(".")[0] == str(index)
            }
            if "master" not in saved or saved["master"].shape != master.shape:
                raise ValueError(
                    f"optimizer tensor {index}.master of {tuple(master.shape)} is missing or of "
                    "another shape"
                )
            master.data.copy_(saved.pop("master"))
            state = self._optimizer.optimizer.state[master]
            for key, value in saved.items():
                state[key] = value.clone() if key == "step" else value.to(master.device, copy=True)

    def _gradients(self) -> list[Tensor]:
        """Returns this rank's share of the reduced gradient, under DeepSpeed's two names for it."""
        optimizer = self._optimizer
        if hasattr(optimizer, "averaged_gradients"):
            return [
                gradient
                for group in optimizer.averaged_gradients.values()
                for gradient in group or ()
            ]
        if hasattr(optimizer, "fp32_groups_gradients_flat"):
            return list(optimizer.fp32_groups_gradients_flat)
        raise _unknown(optimizer)

    def _masters(self) -> list[Tensor]:
        """Returns the flat float32 partitions that the base optimizer updates, under DeepSpeed's
        three names for them.
        """
        optimizer = self._optimizer
        for name in (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        ):
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        raise _unknown(optimizer)


def _unknown(optimizer: object) -> TypeError:
    return TypeError(
        f"{type(optimizer).__name__} is not an optimizer of DeepSpeed ZeRO that this trainer knows"
    )


def _initialize(
    policy: PolicyModel,
    zero_stage: int,
    dtype: torch.dtype,
    settings: OptimizerSettings,
    delay_compensation: float,
) -> tuple[Any, Any]:
    import deepspeed

    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, settings, delay_compensation)
    engine, zero_optimizer, _, _ = deepspeed.initialize(
        model=policy,
        optimizer=optimizer,
        config=deepspeed_config(zero_stage, dtype, settings, delay_compensation),
        dist_init_required=False,
    )
    return engine, zero_optimizer


def deepspeed_config(
    zero_stage: int,
    dtype: torch.dtype,
    settings: OptimizerSettings,
    delay_compensation: float = 0.0,
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. Gradients are accumulated in float32 whatever the weights'
    type is.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "steps_per_print": 1 << 62,
        "zero_optimization": {"stage": zero_stage},
    }
    if delay_compensation > 0:
        # DeepSpeed recognises the optimizers that it supports by their class.
        config["zero_allow_untested_optimizer"] = True
    if dtype is torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if dtype is torch.float16:
        config |= {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def chunks(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Yields consecutive items in lists of at most `most` in size, but at least one item each."""
    members: list[Item] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if members and size + item_size > most:
            yield members
            members, size = [], 0
        members.append(item)
        size += item_size
    if members:
        yield members
