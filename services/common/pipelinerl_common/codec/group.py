"""Sample groups on the stream: see sample.proto."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from google.protobuf.message import DecodeError

from pipelinerl.v1 import sample_pb2
from pipelinerl_common.codec.columns import FLOAT32, UINT32, check, from_bytes, runs_from_proto, runs_to_proto, to_bytes
from pipelinerl_common.errors import MalformedMessage, PermanentError
from pipelinerl_common.types import FinishReason, GroupId, Sample, SampleGroup

SCHEMA_VERSION: Final = 1

_SAMPLE_OVERHEAD_BYTES: Final = 6
"""Tag and length prefix of one sample inside a group, at most."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One message of a group. `message_id` is "<group_id>:<attempt>:<part>", by which the server drops repeated publishes."""

    message_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One decoded message: `header` is the group with only this part's samples.

    Example: a group of 8 samples in two messages is part 0 of 2 with 5 samples and part 1 of 2 with 3, both num_samples=8.
    """

    header: SampleGroup
    part: int
    num_parts: int
    num_samples: int


def encode_group(group: SampleGroup, max_payload_bytes: int) -> list[EncodedPart]:
    """The group in as few messages of at most `max_payload_bytes` as samples in order allow.

    Raises PermanentError when one sample alone is larger, and ValueError when a column breaks the type's invariants.
    """
    if not group.samples or not group.group_id:
        raise ValueError(f"group {group.group_id!r} of {len(group.samples)} samples: needs an id and a sample")
    samples = [_sample_to_proto(sample) for sample in group.samples]
    header = sample_pb2.SampleGroup(
        schema_version=SCHEMA_VERSION,
        job=group.job,
        group_id=group.group_id,
        attempt=group.attempt,
        prompt_index=group.prompt_index,
        temperature=group.temperature,
        part=len(samples),  # stands for the largest value while sizes are computed
        num_parts=len(samples),
        num_samples=len(samples),
        finished_at=group.finished_at,
    )
    chunks = _split(samples, max_payload_bytes - header.ByteSize(), group.group_id, max_payload_bytes)
    parts = []
    for part, chunk in enumerate(chunks):
        header.part, header.num_parts = part, len(chunks)
        message = sample_pb2.SampleGroup(samples=chunk)
        message.MergeFrom(header)
        payload = message.SerializeToString(deterministic=True)
        parts.append(EncodedPart(f"{group.group_id}:{group.attempt}:{part}", payload))
    return parts


def _split(
    samples: Sequence[sample_pb2.Sample], budget_bytes: int, group_id: str, max_payload_bytes: int
) -> list[list[sample_pb2.Sample]]:
    """Consecutive samples in chunks that fit into `budget_bytes` each."""
    chunks: list[list[sample_pb2.Sample]] = [[]]
    used_bytes = 0
    for sample in samples:
        size = sample.ByteSize() + _SAMPLE_OVERHEAD_BYTES
        if size > budget_bytes:
            raise PermanentError(
                f"group {group_id}: sample {sample.index} takes {size} bytes, more than fit into the stream's payload limit "
                f"of {max_payload_bytes}: raise the server's max_payload or lower task.sampling.maxTokens"
            )
        if used_bytes + size > budget_bytes:
            chunks.append([])
            used_bytes = 0
        chunks[-1].append(sample)
        used_bytes += size
    return chunks


def _sample_to_proto(sample: Sample) -> sample_pb2.Sample:
    num_given_and_sampled = len(sample.token_ids_S), len(sample.logprobs_T)
    by_segments = sum(sample.segment_lengths), sum(sample.segment_lengths[1::2])
    num_in_runs = sum(run.num_tokens for run in sample.version_runs)
    if num_given_and_sampled != by_segments or num_in_runs != by_segments[1]:
        raise ValueError(
            f"sample {sample.index}: segments {sample.segment_lengths} do not fit {num_given_and_sampled[0]} token ids, "
            f"{num_given_and_sampled[1]} log-probabilities and version runs over {num_in_runs} tokens"
        )
    return sample_pb2.Sample(
        index=sample.index,
        token_ids=to_bytes(sample.token_ids_S, UINT32),
        segment_lengths=sample.segment_lengths,
        logprobs=to_bytes(sample.logprobs_T, FLOAT32),
        version_runs=runs_to_proto(sample.version_runs),
        reward=sample.reward,
        finish_reason=cast("sample_pb2.FinishReason.ValueType", int(sample.finish_reason)),
        metrics=sample.metrics,
    )


def decode_part(payload: bytes) -> GroupPart:
    """One message from the stream. Raises MalformedMessage, whose `reason` says in a word what is wrong."""
    try:
        message = sample_pb2.SampleGroup.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage(f"{len(payload)} bytes are no SampleGroup: {error}", "unparsable") from error
    version = message.schema_version
    check(version == SCHEMA_VERSION, "schema_version", f"schema_version={version}, this reader knows {SCHEMA_VERSION}")
    _check_header(message)
    samples = tuple([_sample_from_proto(sample) for sample in message.samples])
    indices = {sample.index for sample in samples}
    check(len(indices) == len(samples), "sample_index", f"group {message.group_id}: two samples with the same index")
    header = SampleGroup(
        job=message.job,
        group_id=GroupId(message.group_id),
        attempt=message.attempt,
        prompt_index=message.prompt_index,
        temperature=message.temperature,
        samples=samples,
        finished_at=message.finished_at,
    )
    return GroupPart(header, part=message.part, num_parts=message.num_parts, num_samples=message.num_samples)


def _check_header(message: sample_pb2.SampleGroup) -> None:
    name = f"group {message.group_id!r}"
    check(bool(message.group_id), "group_id", "group_id is empty")
    check(bool(message.job), "job", f"{name}: job is empty")
    here, total = len(message.samples), message.num_samples
    check(here > 0, "empty", f"{name}: no samples")
    check(here <= total, "num_samples", f"{name}: {here} samples in a part of a group of num_samples={total}")
    part, num_parts = message.part, message.num_parts
    check(part < num_parts, "parts", f"{name}: part={part} is not below num_parts={num_parts}")
    check(num_parts <= total, "parts", f"{name}: num_parts={num_parts} is more than num_samples={total}")
    check(num_parts > 1 or here == total, "num_samples", f"{name}: {here} samples in the only part, num_samples={total}")
    temperature = message.temperature
    check(temperature > 0 and math.isfinite(temperature), "temperature", f"{name}: temperature={temperature} must be above 0")


def _sample_from_proto(message: sample_pb2.Sample) -> Sample:
    name = f"sample {message.index}"
    token_ids_S = from_bytes(message.token_ids, UINT32, f"{name}: token_ids")
    logprobs_T = from_bytes(message.logprobs, FLOAT32, f"{name}: logprobs")
    segment_lengths = tuple(message.segment_lengths)
    check(bool(segment_lengths) and segment_lengths[0] > 0, "segments", f"{name}: no prompt, segments={segment_lengths}")
    num_tokens, num_sampled = sum(segment_lengths), sum(segment_lengths[1::2])
    check(num_tokens == len(token_ids_S), "segments", f"{name}: {len(token_ids_S)} token ids, segments={segment_lengths}")
    check(num_sampled == len(logprobs_T), "segments", f"{name}: {len(logprobs_T)} logprobs, segments={segment_lengths}")
    try:
        finish_reason = FinishReason(message.finish_reason)
    except ValueError as error:
        raise MalformedMessage(f"{name}: finish_reason={message.finish_reason} is unknown", "finish_reason") from error
    return Sample(
        index=message.index,
        token_ids_S=token_ids_S,
        segment_lengths=segment_lengths,
        logprobs_T=logprobs_T,
        version_runs=runs_from_proto(message.version_runs, num_sampled),
        reward=message.reward,
        finish_reason=finish_reason,
        metrics=dict(message.metrics),
    )


def whole(header: SampleGroup, samples: Sequence[Sample]) -> SampleGroup:
    """The group of `header` with all its samples, by index. Raises MalformedMessage unless they make a group."""
    ordered = sorted(samples, key=lambda sample: sample.index)
    indices = {sample.index for sample in ordered}
    check(len(indices) == len(ordered), "sample_index", f"group {header.group_id}: two samples with the same index")
    check(any(sample.num_sampled for sample in ordered), "empty", f"group {header.group_id}: no sampled token in any sample")
    return replace(header, samples=tuple(ordered))
