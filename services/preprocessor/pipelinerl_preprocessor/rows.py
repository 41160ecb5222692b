"""TODO: say what this file is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.types import MicroBatch, VersionRun, merge_runs


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
    logprobs_T: NDArray[np.float32]
    ref_logprobs_T: NDArray[np.float32] | None
    version_runs: tuple[VersionRun, ...]
    advantage: float
    returns_T: NDArray[np.float32] | None
    """Targets of a value head, None without one."""
    reward: float
    weight: float = 1.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_S)

    @property
    def num_trained(self) -> int:
        """Tokens with a loss: those that were sampled."""
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
    """Lays `members`, (group number, sequence) pairs, one after another into `num_slots` slots; the
    rest is padding.

    `reference` and `returns` tell whether the row has those columns, filler rows included.
    """
    sequences = [sequence for _, sequence in members]
    lengths = [sequence.num_tokens for sequence in sequences]
    used = sum(lengths)
    sampled_L = np.zeros(num_slots, dtype=bool)
    segments = [length for sequence in sequences for length in sequence.segment_lengths]
    sampled_L[:used] = np.repeat(np.tile([False, True], len(segments) // 2), segments)

    def per_slot(columns: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        slots_L = np.zeros(num_slots, dtype=np.float32)
        if columns:
            slots_L[sampled_L] = np.concatenate(columns)
        return slots_L

    def per_sequence(values: list[float]) -> NDArray[np.float32]:
        slots_L = np.zeros(num_slots, dtype=np.float32)
        slots_L[:used] = np.repeat(np.asarray(values, dtype=np.float32), lengths)
        slots_L[~sampled_L] = 0
        return slots_L

    input_ids_L = np.zeros(num_slots, dtype=np.uint32)
    if sequences:
        input_ids_L[:used] = np.concatenate([sequence.token_ids_S for sequence in sequences])
    references = [s.ref_logprobs_T for s in sequences if s.ref_logprobs_T is not None]
    targets = [s.returns_T for s in sequences if s.returns_T is not None]
    return MicroBatch(
        index=index,
        sequence_lengths=tuple(lengths),
        input_ids_L=input_ids_L,
        loss_mask_L=sampled_L.astype(np.uint8),
        old_logprobs_L=per_slot([sequence.logprobs_T for sequence in sequences]),
        advantages_L=per_sequence([sequence.advantage for sequence in sequences]),
        ref_logprobs_L=per_slot(references) if reference else None,
        returns_L=per_slot(targets) if returns else None,
        rewards=tuple(sequence.reward for sequence in sequences),
        sequence_weights=tuple(sequence.weight for sequence in sequences),
        version_runs=merge_runs(run for sequence in sequences for run in sequence.version_runs),
        temperature=temperature,
        group_numbers=tuple(number for number, _ in members),
    )
