"""Packed rows as the model's inputs: position ids restart with each sequence, and attention never
crosses sequences.

Shape suffixes: L token slots of the row that sequences use (padding is cut off), T trained tokens
of it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.types import MicroBatch

Columns = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One micro-batch on the device.

    Example: sequences of 5 and 3 tokens in 10 slots, sampled from their 3rd and 2nd token on: L =
    8, position_ids_L 0 1 2 3 4 0 1 2, sequence_lengths (5, 3), target_slots_T 2 3 4 6 7 and
    input_ids_L[target_slots_T] the 5 trained tokens.
    """

    input_ids_L: Tensor
    position_ids_L: Tensor
    sequence_lengths: tuple[int, ...]
    """They add up to L, so every slot belongs to a sequence."""
    target_slots_T: Tensor
    """Slots of the trained tokens. The logits that predict the token of slot t are those of slot t
    - 1.
    """
    temperature: float

    @property
    def targets_T(self) -> Tensor:
        return self.input_ids_L[self.target_slots_T]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The columns of a row's trained tokens, float32 on the device."""

    old_logprobs_T: Tensor
    advantages_T: Tensor
    ref_logprobs_T: Tensor | None
    returns_T: Tensor | None
    weights_T: Tensor
    """Weight of the token's sequence."""
    sequence_T: Tensor
    """int64: number of the token's sequence in the row, from 0 in ascending order."""


def pack_row(batch: MicroBatch, device: torch.device) -> tuple[PackedRow, TokenColumns]:
    """Returns a row without its padding, and the columns of its trained tokens only. Raises
    MalformedMessage for an impossible row.

    A filler row (no sequences) becomes a row of one token and no trained ones: its loss is zero,
    but every rank runs the same collectives. A sequence's first token has nothing that predicts it,
    so it is never trained, whatever the mask says.
    """
    if not batch.sequence_lengths:
        return _filler(device, batch)
    lengths = batch.sequence_lengths
    num_used = sum(lengths)
    if min(lengths) < 1 or num_used > batch.num_slots:
        raise MalformedMessage(
            f"micro-batch {batch.index}: sequence lengths {lengths} do not fit {batch.num_slots} "
            "slots"
        )
    if batch.temperature <= 0:
        raise MalformedMessage(
            f"micro-batch {batch.index}: temperature {batch.temperature} is not above 0"
        )
    starts = np.cumsum((0, *lengths[:-1]))
    mask_L = batch.loss_mask_L[:num_used] != 0
    mask_L[starts] = False
    (slots_T,) = np.nonzero(mask_L)
    owners_L = np.repeat(np.arange(len(lengths)), lengths)
    weights = np.asarray(batch.sequence_weights, dtype=np.float32)
    row = PackedRow(
        input_ids_L=_integers(batch.input_ids_L[:num_used], device),
        position_ids_L=_integers(np.arange(num_used) - starts[owners_L], device),
        sequence_lengths=tuple(lengths),
        target_slots_T=_integers(slots_T, device),
        temperature=batch.temperature,
    )
    columns = TokenColumns(
        old_logprobs_T=_column(batch.old_logprobs_L, slots_T, device),
        advantages_T=_column(batch.advantages_L, slots_T, device),
        ref_logprobs_T=_optional(batch.ref_logprobs_L, slots_T, device),
        returns_T=_optional(batch.returns_L, slots_T, device),
        weights_T=_column(weights, owners_L[slots_T], device),
        sequence_T=_integers(owners_L[slots_T], device),
    )
    return row, columns


def _filler(device: torch.device, batch: MicroBatch) -> tuple[PackedRow, TokenColumns]:
    token, nothing = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    row = PackedRow(token, token, (1,), token[:0], temperature=1.0)
    reference = None if batch.ref_logprobs_L is None else nothing
    returns = None if batch.returns_L is None else nothing
    return row, TokenColumns(nothing, nothing, reference, returns, nothing, token[:0])


def _integers(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _optional(
    values: Columns | None, index: NDArray[np.int64], device: torch.device
) -> Tensor | None:
    return None if values is None else _column(values, index, device)


def _column(values: Columns, index: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values[index].astype(np.float32)).to(device)
