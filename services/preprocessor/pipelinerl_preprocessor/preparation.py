"""From a finished group to sequences ready to be packed: checks, reward shaping, advantages. Pure.

The contribution of a trajectory:
    empty completion                   its reward to the baseline; counts as a sequence of the step
    truncated, completions: mask       its reward to the baseline
    longer than a row or the model     its reward to the baseline, counted as over-long
    any other                          its reward and its tokens
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelinerl_common.settings import JobSpec
from pipelinerl_common.types import FinishReason, Sample, SampleGroup
from pipelinerl_preprocessor.advantage import (
    BASELINES,
    Floats,
    advantages,
    kl_per_token,
    overlong_penalty,
    returns,
)
from pipelinerl_preprocessor.groups import DropReason
from pipelinerl_preprocessor.rows import TrainSequence

_LARGEST = float(np.finfo(np.float32).max)
"""Advantages travel as 32-bit floats."""


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """A group that passed every check. `num_sequences` counts its trajectories for the loss's
    normaliser.

    Example: of 4 trajectories the 2nd is over-long: 3 sequences, members (0, 2, 3), 4 rewards.
    """

    group_id: str
    attempt: int
    sequences: tuple[TrainSequence, ...]
    members: tuple[int, ...]
    """The index of each sequence among the group's trajectories."""
    num_sequences: int
    num_masked: int
    num_overlong: int
    rewards: tuple[float, ...]
    """Rewards of all trajectories as the task gave them, before shaping."""
    shaped_rewards: tuple[float, ...]
    """Rewards of all trajectories with the over-long penalty."""
    successes: tuple[float, ...]
    completion_lengths: tuple[int, ...]
    cut_off: tuple[bool, ...]
    """Whether each trajectory ended at maxTokens."""
    traceparent: str = ""
    """Trace context of its preparation; empty when the group is not traced."""


class Preparation:
    """Applies one job's rules to groups."""

    def __init__(self, spec: JobSpec) -> None:
        self._algorithm = spec.algorithm
        self._overlong = spec.algorithm.overlong
        self._temperature = spec.task.sampling.temperature
        self._max_completion = spec.task.sampling.max_tokens
        self._max_tokens = min(spec.trainers.micro_batch_tokens, spec.model.max_model_len)
        self._group_size = spec.task.group_size

    def fault(
        self, group: SampleGroup, prompt_index: int, newest_version: int
    ) -> DropReason | None:
        """The reason why the group, leased for `prompt_index`, cannot be trained while the trainer
        is at most at `newest_version`; None when it can.
        """
        samples = group.samples
        if group.prompt_index != prompt_index or len(samples) > self._group_size:
            return DropReason.MISMATCH
        if not math.isclose(group.temperature, self._temperature, rel_tol=1e-5):
            return DropReason.TEMPERATURE
        if not all(
            math.isfinite(sample.reward) and np.isfinite(sample.logprobs_T).all()
            for sample in samples
        ):
            return DropReason.NON_FINITE
        if any(
            not 0 <= run.policy_version <= newest_version
            for sample in samples
            for run in sample.version_runs
        ):
            return DropReason.BAD_VERSION
        if len(samples) < BASELINES[self._algorithm.baseline].min_samples:
            return DropReason.TOO_FEW_SAMPLES
        return None

    def prepare(self, group: SampleGroup) -> PreparedGroup | DropReason:
        """The sequences of a group without a `fault`, or the reason why none of it is trained."""
        samples = group.samples
        shaped_G = np.array(
            [
                sample.reward + overlong_penalty(sample, self._overlong, self._max_completion)
                for sample in samples
            ]
        )
        if self._algorithm.drop_zero_advantage and np.all(shaped_G == shaped_G[0]):
            return DropReason.ZERO_ADVANTAGE
        overlong = [len(sample.token_ids_S) > self._max_tokens for sample in samples]
        masked = [
            self._overlong.completions == "mask" and sample.finish_reason is FinishReason.LENGTH
            for sample in samples
        ]
        trained = [not (long or hidden) for long, hidden in zip(overlong, masked, strict=True)]
        candidates = [
            (index, _sequence(sample)) for index, sample in enumerate(samples) if trained[index]
        ]
        kept = [(index, sequence) for index, sequence in candidates if sequence.num_trained > 0]
        if not kept:
            return DropReason.NO_TOKENS
        prepared = PreparedGroup(
            group_id=group.group_id,
            attempt=group.attempt,
            sequences=tuple(sequence for _, sequence in kept),
            members=tuple(index for index, _ in kept),
            num_sequences=sum(trained),
            num_masked=sum(masked),
            num_overlong=sum(overlong),
            rewards=tuple(sample.reward for sample in samples),
            shaped_rewards=tuple(shaped_G.tolist()),
            successes=tuple(
                sample.metrics["success"]
                for sample in samples
                if math.isfinite(sample.metrics.get("success", math.nan))
            ),
            completion_lengths=tuple(sample.num_sampled for sample in samples),
            cut_off=tuple(sample.finish_reason is FinishReason.LENGTH for sample in samples),
        )
        return self._rewarded(prepared, [np.zeros(sample.num_sampled) for sample in samples])

    def with_reference(
        self, group: PreparedGroup, ref_logprobs: Iterable[NDArray[np.float32]]
    ) -> PreparedGroup | DropReason:
        """The same group with T reference log-probs for each sequence, in order, and the penalty of
        `kl.placement: reward`.

        A trajectory that is not trained was not scored: the mean penalty of the group's others
        stands for its own.
        """
        pairs = zip(group.sequences, ref_logprobs, strict=True)
        scored = replace(
            group,
            sequences=tuple(replace(sequence, ref_logprobs_T=column) for sequence, column in pairs),
        )
        if self._algorithm.kl.placement == "loss":
            return scored
        known = dict(zip(scored.members, map(self._penalties, scored.sequences), strict=True))
        unknown = np.array([np.mean([penalties_T.sum() for penalties_T in known.values()])])
        return self._rewarded(
            scored, [known.get(index, unknown) for index in range(len(group.rewards))]
        )

    def _penalties(self, sequence: TrainSequence) -> Floats:
        """The penalty of each sampled token of a scored sequence."""
        assert sequence.ref_logprobs_T is not None
        kl = self._algorithm.kl
        return kl.coefficient * kl_per_token(
            sequence.logprobs_T, sequence.ref_logprobs_T, kl.estimator
        )

    def _rewarded(
        self, group: PreparedGroup, penalties: Sequence[Floats]
    ) -> PreparedGroup | DropReason:
        """The group with advantages, and returns for a value head, of its rewards less the
        `penalties` of G trajectories.
        """
        rewards_G = np.array(group.shaped_rewards)
        advantages_G = advantages(
            rewards_G - [penalties_T.sum() for penalties_T in penalties], self._algorithm
        )
        if not np.all(np.abs(advantages_G) <= _LARGEST):
            return DropReason.NON_FINITE
        sequences = []
        for index, sequence in zip(group.members, group.sequences, strict=True):
            returns_T = None
            if self._algorithm.baseline == "value":
                returns_T = returns(
                    rewards_G[index], penalties[index], self._algorithm.discount
                ).astype(np.float32)
            sequences.append(
                replace(sequence, advantage=float(advantages_G[index]), returns_T=returns_T)
            )
        return replace(group, sequences=tuple(sequences))


def _sequence(sample: Sample) -> TrainSequence:
    """The trajectory without its advantage, which depends on the whole group."""
    segments = sample.segment_lengths
    return TrainSequence(
        token_ids_S=sample.token_ids_S,
        segment_lengths=segments if len(segments) % 2 == 0 else (*segments, 0),
        logprobs_T=sample.logprobs_T,
        ref_logprobs_T=None,
        version_runs=sample.version_runs,
        advantage=0.0,
        returns_T=None,
        reward=sample.reward,
    )
