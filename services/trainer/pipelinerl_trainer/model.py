"""The policy: a causal language model that scores packed rows, with an optional value head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import JobSpec, ModelSettings
from pipelinerl_trainer import attention
from pipelinerl_trainer.packed import PackedRow
from pipelinerl_trainer.scoring import LogitTransform, TokenHead, TokenScores


class PolicyModel(nn.Module):
    """`forward(row)` gives log-probabilities, entropies and values of the row's trained tokens.

    The value of token t is read where token t is chosen, at the hidden state that predicts it, so that it is a baseline: it
    knows the tokens before t and not t itself.
    """

    def __init__(self, language_model: Any, *, with_value_head: bool, head_in_float32: bool = False) -> None:
        super().__init__()
        self.language_model = language_model
        transform = LogitTransform.of(language_model.config)
        self.token_head = TokenHead(language_model.get_output_embeddings(), transform, in_float32=head_in_float32)
        self.value_head: nn.Linear | None = None
        if with_value_head:
            weight = language_model.get_output_embeddings().weight
            self.value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, row: PackedRow, entropy_gradient: bool = False) -> TokenScores:
        hidden_LH: Tensor = self.language_model.get_decoder()(
            input_ids=row.input_ids_L[None],
            position_ids=row.position_ids_L[None],
            use_cache=False,
            **attention.attention_arguments(row.sequence_lengths, row.input_ids_L.device),
        ).last_hidden_state[0]
        hidden_TH = hidden_LH[row.target_slots_T - 1]
        logprobs_T, entropy_T = self.token_head(hidden_TH, row.targets_T, row.temperature, entropy_gradient)
        values_T = None if self.value_head is None else self.value_head(hidden_TH)[:, 0].float()
        return TokenScores(logprobs_T, entropy_T, values_T)

    def served_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What generators need, by the checkpoint's names; a tied head is not listed beside the embedding."""
        yield from self.language_model.named_parameters()


def load_policy(folder: Path, spec: JobSpec, device: torch.device) -> PolicyModel:
    """Reads a Hugging Face folder for the job's loss. Raises SettingsError when there is no model that this trainer can train.

    Dropout is off: generators have none, and the trained log-probabilities must be those of the same distribution.
    """
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model folder {folder}: there is no config.json in it; prepare the model first")
    attention.register()
    disable_progress_bar()
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    try:
        language_model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True)),
            dtype=dtype,
            attn_implementation=attention.choose_attention(device, dtype),
            local_files_only=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise SettingsError(f"model folder {folder}: cannot be loaded: {error}") from error
    language_model.config.use_cache = False
    _check_names(folder, language_model)
    _check_length(language_model.config, spec.model)
    if spec.trainers.activation_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(
        language_model,
        with_value_head=spec.algorithm.baseline == "value",
        head_in_float32=spec.model.head_dtype == "float32",
    ).train()


def _without_dropout(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _check_length(config: Any, settings: ModelSettings) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and settings.max_model_len > limit:
        raise SettingsError(f"model.maxModelLen={settings.max_model_len} is more than the model's {limit} positions")


def _check_names(folder: Path, language_model: nn.Module) -> None:
    """Weights are sent under the model's own names, and generators load them by the checkpoint's: they must be the same."""
    known: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                known.update(tensors.keys())
        except SafetensorError as error:
            raise SettingsError(f"model folder {folder}: {file.name} is not a safetensors file: {error}") from error
    unknown = sorted(name for name, _ in language_model.named_parameters() if name not in known)
    if unknown and known:
        raise SettingsError(
            f"model.uri: {len(unknown)} weights are named otherwise in the checkpoint than in memory, such as {unknown[0]}; "
            "models of this kind are not supported"
        )
