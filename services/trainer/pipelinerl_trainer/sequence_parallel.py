"""Sequence parallelism: S ranks train one packed row together, so that a row may be S times as long
as one device holds.

    slots of the row     0 ........ L/S ........ 2L/S ........ L
    rank 0               [ slots, all heads ]
    rank 1                           [ slots, all heads ]
    in attention         all slots, heads / S, on every rank

Every rank of a group gets the whole row, which is small, and computes an equal slice of its
slots: embeddings, norms, MLPs, the head. Only attention looks at other slots: there slots are
swapped for heads by all-to-all and back again (DeepSpeed's DistributedAttention around ours), and
the boundaries of the sequences are those of the whole row. A token is scored by the rank that holds
the hidden state which predicts it, of the slot before its own. The scores are then added up over
the group, so that every rank computes the loss of the whole row: importance weights and advantages
of a sequence need all of its tokens.

Source: DeepSpeed Ulysses (arXiv 2309.14509).

Shape suffixes: L token slots of the row, C those of this rank, T trained tokens of the row, U those
that this rank scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.packed import PackedRow
from pipelinerl_trainer.scoring import TokenScores

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [1, tokens, heads, D], key and value [1, tokens, kv_heads, D] to [1, tokens, heads, D]."""


_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""transformers' names of layers in which only attention looks at other tokens."""


class RowSlice(NamedTuple):
    """This rank's part of a row.

    Example: sequences of 5 and 2 tokens on two ranks: L = 7 is filled up to 8 by a sequence of one
    slot, so sequence_lengths are (5, 2, 1). Rank 1 has slots 4 to 7, position_ids_C 4 0 1 0. Of
    target_slots_T 2 3 4 6 it scores the last one, whose predicting slot is 5: scored_U (3),
    predicting_slots_U (1).
    """

    input_ids_C: Tensor
    position_ids_C: Tensor
    sequence_lengths: tuple[int, ...]
    """Lengths of the whole row's sequences, with the padding as a sequence of its own."""
    scored_U: Tensor
    """Places in T of the tokens that this rank scores."""
    predicting_slots_U: Tensor
    """Slots of the hidden states that predict them, counted from this rank's first."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share this rank's rows, in the order of their slots."""

    index: int = 0
    """This rank's place in the group."""
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def slice_of(self, row: PackedRow) -> RowSlice:
        """Returns this rank's part of `row`: all of it for a rank alone."""
        if self.size == 1:
            everything_U = torch.arange(len(row.target_slots_T), device=row.target_slots_T.device)
            predicting_slots_U = row.target_slots_T - 1
            return RowSlice(
                row.input_ids_L,
                row.position_ids_L,
                row.sequence_lengths,
                everything_U,
                predicting_slots_U,
            )
        filling = -len(row.input_ids_L) % self.size
        num_slots = (len(row.input_ids_L) + filling) // self.size
        first = self.index * num_slots
        filling_ids = torch.arange(filling, device=row.position_ids_L.device)
        predicting_slots_T = row.target_slots_T - 1 - first
        (scored_U,) = torch.nonzero(
            (predicting_slots_T >= 0) & (predicting_slots_T < num_slots), as_tuple=True
        )
        return RowSlice(
            input_ids_C=pad(row.input_ids_L, (0, filling))[first : first + num_slots],
            position_ids_C=torch.cat([row.position_ids_L, filling_ids])[first : first + num_slots],
            sequence_lengths=(*row.sequence_lengths, filling) if filling else row.sequence_lengths,
            scored_U=scored_U,
            predicting_slots_U=predicting_slots_T[scored_U],
        )

    def whole(self, scores: TokenScores, scored_U: Tensor, num_tokens: int) -> TokenScores:
        """Returns the scores of all `num_tokens` tokens of the row on every rank of the group, from
        each rank's own.

        The gradient of a rank's own scores returns to that rank alone. Every rank computes the same
        loss from the whole scores, so backward adds nothing up: the sum of the ranks' weight
        gradients is that of one loss.
        """
        if self.size == 1 or not num_tokens:
            return scores
        columns_KU = torch.stack([column for column in scores if column is not None])
        columns_KT = columns_KU.new_zeros(len(columns_KU), num_tokens).index_copy(
            1, scored_U, columns_KU
        )
        total_KT: Tensor = _SumOverGroup.apply(columns_KT, self.process_group)  # type: ignore[no-untyped-call]
        logprobs_T, entropy_T, *values = total_KT
        return TokenScores(
            logprobs_T,
            entropy_T if scores.entropy_T.requires_grad else entropy_T.detach(),
            values[0] if values else None,
        )

    def attention(self, attend: AttentionFunction) -> AttentionFunction:
        """Turns `attend`, which needs all slots, into a function of this rank's slots and all
        heads.

        If there are fewer key-value heads than ranks they are repeated, so that each rank has the
        one that its query heads belong to.
        """
        if self.size == 1:
            return attend
        from deepspeed.sequence.layer import DistributedAttention

        swapped: Any = DistributedAttention(attend, self.process_group, scatter_idx=2, gather_idx=1)

        def on_slices(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            repeats = self.size // key.shape[2] if key.shape[2] % self.size else 1
            key, value = (
                (states.repeat_interleave(repeats, dim=2) for states in (key, value))
                if repeats > 1
                else (key, value)
            )
            output: Tensor = swapped(query, key, value, batch_dim_idx=0)
            return output

        return on_slices

    def check_model(self, config: Any) -> None:
        """Raises SettingsError for a model whose heads cannot be divided, or with layers other than
        attention that look at other tokens.
        """
        if self.size == 1:
            return
        text = config.get_text_config()
        unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
        if unknown:
            raise SettingsError(
                f"trainers.sequenceParallelSize={self.size}: in the model's layers of {unknown[0]} "
                "tokens would not see those of other ranks: set it to 1"
            )
        heads = int(text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        if heads % self.size:
            raise SettingsError(
                f"trainers.sequenceParallelSize={self.size} does not divide the model's {heads} "
                "attention heads: set a divisor"
            )
        if kv_heads % self.size and self.size % kv_heads:
            raise SettingsError(
                f"trainers.sequenceParallelSize={self.size}: the model's {kv_heads} key-value "
                f"heads can neither be shared out among {self.size} ranks nor repeated for them: "
                f"set a divisor or a multiple of {kv_heads}"
            )


ALONE = SequenceGroup()
"""A rank that shares its rows with no other."""


class _SumOverGroup(torch.autograd.Function):
    """Sums over the group in forward and passes the gradient in backward, as
    `SequenceGroup.whole` explains.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
