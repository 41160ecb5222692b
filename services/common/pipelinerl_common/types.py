"""The types that cross processes, as numpy columns.

Shape suffixes: S tokens of a trajectory, T sampled tokens of it, L token slots of a packed row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

GroupId = NewType("GroupId", str)
"""`<incarnation>-<sequence>`, for example "0-17": the 18th group of a ledger that was never
rewound.
"""
PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps behind the weights; 0 for the initial weights."""


class FinishReason(IntEnum):
    """Why a trajectory ended; the numbers are those of sample.proto."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class VersionRun:
    """A run of `num_tokens` consecutive tokens that `policy_version` sampled."""

    policy_version: int
    num_tokens: int


def merge_runs(runs: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """Joins neighbouring runs of the same version: (6, 2), (6, 1), (7, 4) become (6, 3), (7, 4)."""
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].policy_version == run.policy_version:
            merged[-1] = VersionRun(run.policy_version, merged[-1].num_tokens + run.num_tokens)
        else:
            merged.append(run)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory.

    Example: a 4-token prompt and 3 sampled tokens, two of version 6 and one of 7, is
    token_ids_S of 7, segment_lengths (4, 3), logprobs_T of 3, version_runs (VersionRun(6, 2),
    VersionRun(7, 1)).
    """

    index: int
    token_ids_S: NDArray[np.uint32]
    segment_lengths: tuple[int, ...]
    """Alternating given, sampled, given, sampled, ...; they add up to S and the sampled ones to T.
    """
    logprobs_T: NDArray[np.float32]
    version_runs: tuple[VersionRun, ...]
    reward: float
    finish_reason: FinishReason
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs_T)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All trajectories of one prompt (parts already joined)."""

    job: str
    group_id: GroupId
    attempt: int
    prompt_index: int
    temperature: float
    samples: tuple[Sample, ...]
    finished_at: float

    @property
    def num_sampled(self) -> int:
        return sum(sample.num_sampled for sample in self.samples)

    @property
    def birth(self) -> int:
        """The lowest version of any first token; groups always have tokens."""
        return min(
            sample.version_runs[0].policy_version for sample in self.samples if sample.version_runs
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of L token slots. Columns as in batches.proto.

    Example: sequences of 5 and 3 tokens in L=10: sequence_lengths (5, 3); slots 8 and 9 are
    padding.
    """

    index: int
    sequence_lengths: tuple[int, ...]
    input_ids_L: NDArray[np.uint32]
    loss_mask_L: NDArray[np.uint8]
    old_logprobs_L: NDArray[np.float32]
    advantages_L: NDArray[np.float32]
    ref_logprobs_L: NDArray[np.float32] | None
    returns_L: NDArray[np.float32] | None
    rewards: tuple[float, ...]
    sequence_weights: tuple[float, ...]
    version_runs: tuple[VersionRun, ...]
    temperature: float
    group_numbers: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return len(self.input_ids_L)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask_L.sum())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Facts about a step that every rank must know before its first forward pass; see
    batches.proto.
    """

    step: int
    batch_id: str
    group_ids: tuple[GroupId, ...]
    num_micro_batches: int
    num_sequences: int
    num_trained_tokens: int
    publish_after: bool
    metrics: dict[str, float]
    provisional: bool = False
    """Whether more micro-batches follow; the counts then cover those so far."""
    traceparents: tuple[str, ...] = ()
    """Trace contexts of the groups that are traced."""
