"""Sample groups for the tests of this folder."""

from collections.abc import Sequence

import numpy as np

from pipelinerl_common.types import FinishReason, GroupId, Sample, SampleGroup, VersionRun


def make_sample(
    index: int = 0, segment_lengths: Sequence[int] = (4, 3), version: int = 6
) -> Sample:
    """Numbers differ by index and position, so that a mix-up shows."""
    num_tokens, num_sampled = sum(segment_lengths), sum(segment_lengths[1::2])
    return Sample(
        index=index,
        token_ids_S=np.arange(num_tokens, dtype=np.uint32) + 1000 * index,
        segment_lengths=tuple(segment_lengths),
        logprobs_T=(-(np.arange(num_sampled) + 1) / 8).astype(np.float32),
        version_runs=(VersionRun(version, num_sampled),) if num_sampled else (),
        reward=0.25 * index,
        finish_reason=FinishReason.STOP,
        metrics={"success": 1.0},
    )


def make_group(
    sequence: int = 0,
    num_samples: int = 2,
    segment_lengths: Sequence[int] = (4, 3),
    job: str = "job",
) -> SampleGroup:
    return SampleGroup(
        job=job,
        group_id=GroupId(f"0-{sequence}"),
        attempt=1,
        prompt_index=sequence,
        temperature=0.5,
        samples=tuple(make_sample(index, segment_lengths) for index in range(num_samples)),
        finished_at=1_800_000_000.5,
    )


def facts(group: SampleGroup) -> object:
    """Everything that the group says, comparable with ==."""
    return (
        (
            group.job,
            group.group_id,
            group.attempt,
            group.prompt_index,
            group.temperature,
            group.finished_at,
        ),
        [
            (
                sample.index,
                sample.token_ids_S.tolist(),
                sample.segment_lengths,
                sample.logprobs_T.tolist(),
                sample.version_runs,
                sample.reward,
                sample.finish_reason,
                sample.metrics,
            )
            for sample in group.samples
        ],
    )
