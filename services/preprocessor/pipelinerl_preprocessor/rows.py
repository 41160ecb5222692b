"""Training sequences, and the columns of a packed row of them.

Shape suffixes: S tokens of a trajectory, T sampled tokens of it, L token slots of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.types import MicroBatch, VersionRun, merge_runs

Floats32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One trajectory, ready to be packed.

    Example: token_ids_S of 7, segment_lengths (4, 3), logprobs_T of 3: slots 4, 5 and 6 are
    trained.
    """

    token_ids_S: NDArray[np.uint32]
    segment_lengths: tuple[int, ...]
    """Alternating given, sampled, ...; an even number of them. The first is above 0: a sampled
    token has a context.
    """
    logprobs_T: Floats32
    ref_logprobs_T: Floats32 | None
    version_runs: tuple[VersionRun, ...]
    advantage: float
    returns_T: Floats32 | None
    """Targets of a value head, None without one."""
    reward: float
    weight: float = 1.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_S)

    @property
    def num_trained(self) -> int:
        """Number of tokens with a loss: those that were sampled."""
        return len(self.logprobs_T)


def build_row(
    index: int,
    members: Sequence[tuple[int, TrainSequence]],
    num_slots: int,
    temperature: float,
    *,
    reference: bool,
    returns: bool,
) -> MicroBatch:
    """Puts `members`, (group number, sequence) pairs, one after another into `num_slots` slots; the
    rest is padding.

    `reference` and `returns` say whether the row has those columns, which filler rows have too.
    """
    sequences = [sequence for _, sequence in members]
    sampled_L = sampled_slots(sequences, num_slots)
    input_ids_L = np.zeros(num_slots, dtype=np.uint32)
    if sequences:
        token_ids = np.concatenate([sequence.token_ids_S for sequence in sequences])
        input_ids_L[: len(token_ids)] = token_ids
    advantages = [np.full(s.num_trained, s.advantage, dtype=np.float32) for s in sequences]
    return MicroBatch(
        index=index,
        sequence_lengths=tuple(sequence.num_tokens for sequence in sequences),
        input_ids_L=input_ids_L,
        loss_mask_L=sampled_L.astype(np.uint8),
        old_logprobs_L=_column([s.logprobs_T for s in sequences], sampled_L),
        advantages_L=_column(advantages, sampled_L),
        ref_logprobs_L=_column([s.ref_logprobs_T for s in sequences], sampled_L)
        if reference
        else None,
        returns_L=_column([s.returns_T for s in sequences], sampled_L) if returns else None,
        rewards=tuple(sequence.reward for sequence in sequences),
        sequence_weights=tuple(sequence.weight for sequence in sequences),
        version_runs=merge_runs(run for sequence in sequences for run in sequence.version_runs),
        temperature=temperature,
        group_numbers=tuple(number for number, _ in members),
    )


def sampled_slots(sequences: Sequence[TrainSequence], num_slots: int) -> NDArray[np.bool_]:
    """Which of the L slots hold a sampled token."""
    segments = [length for sequence in sequences for length in sequence.segment_lengths]
    sampled_L = np.zeros(num_slots, dtype=bool)
    sampled_L[: sum(segments)] = np.repeat(np.tile([False, True], len(segments) // 2), segments)
    return sampled_L


def _column(values: Sequence[Floats32 | None], sampled_L: NDArray[np.bool_]) -> Floats32:
    """L slots with the T values of each sequence at its sampled tokens, 0 elsewhere."""
    column_L = np.zeros(len(sampled_L), dtype=np.float32)
    if values:
        column_L[sampled_L] = np.concatenate([each for each in values if each is not None])
    return column_L
