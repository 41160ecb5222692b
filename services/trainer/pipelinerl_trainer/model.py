"""The policy: a causal language model that scores packed rows, with an optional value head, and its
parameters as the tensors of its checkpoint, whose names and shapes generators load.

Most parameters are stored as they are. The experts of a mixture are one parameter in memory,
[experts, out, in], and one tensor for each expert and projection in the checkpoint; transformers
knows the conversion of every architecture, and it is reversed here.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import JobSpec, ModelSettings
from pipelinerl_common.text import counted
from pipelinerl_trainer import attention
from pipelinerl_trainer.adapter import Adapter
from pipelinerl_trainer.packed import PackedRow
from pipelinerl_trainer.scoring import LogitTransform, TokenHead, TokenScores
from pipelinerl_trainer.sequence_parallel import ALONE, SequenceGroup
from pipelinerl_weights.adapter import WEIGHT, layer_of

Shape = tuple[int, ...]


class CheckpointTensors:
    """The stored names and shapes of one model's parameters. `stored` are the tensors of the folder
    that it was loaded from; without any, names are those that transformers would save.

    Example: `mlp.experts.gate_up_proj` of [4, 2 * 24, 16] is `mlp.experts.0.gate_proj.weight` to
    `mlp.experts.3.up_proj.weight` of [24, 16] each.
    """

    def __init__(self, language_model: Any, stored: Mapping[str, Shape] | None = None) -> None:
        self._language_model = language_model
        self._kept = frozenset(stored or ())

    def of(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors of the parameter `name`, always in the same order: views of
        `weight` or copies.
        """
        if name in self._kept:
            yield name, weight
        else:
            yield from revert_weight_conversion(self._language_model, {name: weight}).items()

    def shapes_of(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        for stored, tensor in self.of(name, torch.empty(shape, device="meta")):
            yield stored, tuple(tensor.shape)

    def ranges_of(self, name: str, shape: Shape) -> list[tuple[str, int]] | None:
        """Returns each stored tensor of the parameter `name` with the item of the flat parameter at
        which it begins, in the order of `of`; None when one is not a contiguous range of it.
        """
        if name in self._kept:
            return [(name, 0)]
        # The conversions cut and join rows, so the parameter's row numbers show what they do.
        rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
        row_items = shape[-1] if shape else 1
        ranges: list[tuple[str, int]] = []
        for (stored, numbers), (_, stored_shape) in zip(
            self.of(name, rows), self.shapes_of(name, shape), strict=True
        ):
            first = int(numbers.flatten()[0])
            expected = torch.arange(first, first + numbers.numel())
            is_range = bool((numbers.flatten() == expected).all())
            if not is_range or math.prod(stored_shape) != numbers.numel() * row_items:
                return None
            ranges.append((stored, first * row_items))
        return ranges


def stored_shapes(folder: Path) -> dict[str, Shape]:
    """Returns the shapes of all tensors in a Hugging Face folder. Raises SettingsError."""
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise SettingsError(
                f"model folder {folder}: {file.name} is not a safetensors file: {error}"
            ) from error
    return shapes


def check_tensors(
    tensors: CheckpointTensors, language_model: Any, stored: Mapping[str, Shape]
) -> None:
    """Raises SettingsError when a weight would be sent under a name that generators do not know
    from the checkpoint.
    """
    if not stored:
        return
    wrong = [
        name
        for parameter, weight in language_model.named_parameters()
        for name, shape in tensors.shapes_of(parameter, tuple(weight.shape))
        if stored.get(name) != shape
    ]
    if wrong:
        raise SettingsError(
            f"model.uri: {counted(len(wrong), 'weight')} named or shaped otherwise in the "
            f"checkpoint than in memory, such as {min(wrong)}; models of this kind are not "
            "supported"
        )


class PolicyModel(nn.Module):
    """The trained model: `forward(row)` returns log-probabilities, entropies and values of the
    row's trained tokens.

    The value of token t is read where token t is chosen, at the hidden state that predicts it, so
    that it is a baseline: it depends on the tokens before t and not on t. All ranks of `sequence`
    get the same row and have the same result.
    """

    def __init__(
        self,
        language_model: Any,
        *,
        with_value_head: bool,
        head_in_float32: bool = False,
        sequence: SequenceGroup = ALONE,
        tensors: CheckpointTensors | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        self.tensors = tensors or CheckpointTensors(language_model)
        """Names and shapes under which the parameters are stored and sent."""
        self._sequence = sequence
        self.language_model = language_model
        self.adapter = adapter
        transform = LogitTransform.of(language_model.config)
        self.token_head = TokenHead(
            language_model.get_output_embeddings(), transform, in_float32=head_in_float32
        )
        self.value_head: nn.Linear | None = None
        if with_value_head:
            weight = language_model.get_output_embeddings().weight
            self.value_head = nn.Linear(
                weight.shape[1], 1, device=weight.device, dtype=weight.dtype
            )
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, row: PackedRow, entropy_gradient: bool = False) -> TokenScores:
        mine = self._sequence.slice_of(row)
        hidden_CH: Tensor = self.language_model.get_decoder()(
            input_ids=mine.input_ids_C[None],
            position_ids=mine.position_ids_C[None],
            use_cache=False,
            **attention.attention_arguments(
                mine.sequence_lengths, row.input_ids_L.device, self._sequence
            ),
        ).last_hidden_state[0]
        hidden_UH = hidden_CH[mine.predicting_slots_U]
        targets_U = row.targets_T[mine.scored_U]
        logprobs_U, entropy_U = self.token_head(
            hidden_UH, targets_U, row.temperature, entropy_gradient
        )
        values_U = None if self.value_head is None else self.value_head(hidden_UH)[:, 0].float()
        return self._sequence.whole(
            TokenScores(logprobs_U, entropy_U, values_U), mine.scored_U, len(row.target_slots_T)
        )

    def model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the language model's own parameters by their names in memory; a tied head is not
        listed beside the embedding.
        """
        for name, parameter in self.language_model.named_parameters():
            if layer_of(name) is None:
                yield name, parameter


def load_policy(
    folder: Path, spec: JobSpec, device: torch.device, sequence: SequenceGroup = ALONE
) -> PolicyModel:
    """Loads a Hugging Face folder for the job's loss. Raises SettingsError when it has no model
    that this trainer can train.

    Dropout is off: generators have none, and the trained log-probabilities must be those of the
    same distribution.
    """
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"model folder {folder}: there is no config.json in it; prepare the model first"
        )
    attention.register()
    disable_progress_bar()
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    try:
        config = _without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True))
        language_model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.choose_attention(device, dtype, config, sequence),
            local_files_only=True,
        )
    # RuntimeError: tensors that do not fit together
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SettingsError(f"model folder {folder}: cannot be loaded: {error}") from error
    language_model.config.use_cache = False
    stored = stored_shapes(folder)
    tensors = CheckpointTensors(language_model, stored)
    check_tensors(tensors, language_model, stored)
    _check_length(language_model.config, spec.model)
    sequence.check_model(language_model.config)
    adapter = None
    if spec.model.adapter is not None:
        adapter = Adapter.attach(
            language_model, spec.model.adapter, spec.seed, spec.model.uri.removeprefix("hf://")
        )
        _check_layers(adapter, stored)
    if spec.checkpoints_activations:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(
        language_model,
        with_value_head=spec.algorithm.baseline == "value",
        head_in_float32=spec.model.head_dtype == "float32",
        sequence=sequence,
        tensors=tensors,
        adapter=adapter,
    ).train()


def _without_dropout(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _check_length(config: Any, settings: ModelSettings) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and settings.max_model_len > limit:
        raise SettingsError(
            f"model.maxModelLen={settings.max_model_len} is more than the model's {limit} positions"
        )


def _check_layers(adapter: Adapter, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raises SettingsError for a weight that generators would not find by its name."""
    elsewhere = [layer for layer in adapter.layers if stored and f"{layer}{WEIGHT}" not in stored]
    if elsewhere:
        raise SettingsError(
            f"model.adapter: the checkpoint has the weight of {elsewhere[0]} under another name; "
            "choose others in targetModules"
        )
