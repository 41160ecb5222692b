"""Sample groups on the stream (see sample.proto): encoding, decoding, and joining the parts of
groups that were too large for one message.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, cast

from google.protobuf.message import DecodeError

from pipelinerl.v1 import sample_pb2
from pipelinerl_common.codec.columns import FLOAT32, UINT32, from_bytes, runs_from_proto, to_bytes
from pipelinerl_common.errors import MalformedMessage, PermanentError
from pipelinerl_common.types import FinishReason, GroupId, Sample, SampleGroup

SCHEMA_VERSION: Final = 1

_SAMPLE_OVERHEAD_BYTES: Final = 6
"""Largest tag and length prefix of one sample inside a group."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One encoded message of a group. `message_id` is "<group_id>:<attempt>:<part>", by which the
    server drops repeated publishes.
    """

    message_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One decoded message: `header` is the group with only this part's samples.

    Example: a group of 8 samples in two messages is part 0 of 2 with 5 samples and part 1 of 2 with
    3, both with num_samples=8.
    """

    header: SampleGroup
    part: int
    num_parts: int
    num_samples: int


def encode_group(group: SampleGroup, max_payload_bytes: int) -> list[EncodedPart]:
    """The group in as few messages of at most `max_payload_bytes` as its samples in order allow.

    Raises PermanentError when one sample alone is larger, and ValueError when a column breaks the
    type's invariants.
    """
    if not group.samples or not group.group_id:
        raise ValueError(
            f"group {group.group_id!r} of {len(group.samples)} samples: needs an id and a sample"
        )
    message = _header_to_proto(group)
    for sample in group.samples:
        _fill_sample(message.samples.add(), sample)
    payload = message.SerializeToString(deterministic=True)
    if len(payload) <= max_payload_bytes:
        return [EncodedPart(f"{group.group_id}:{group.attempt}:0", payload)]
    return _encode_parts(group, message, max_payload_bytes)


def _header_to_proto(group: SampleGroup) -> sample_pb2.SampleGroup:
    return sample_pb2.SampleGroup(
        schema_version=SCHEMA_VERSION,
        job=group.job,
        group_id=group.group_id,
        attempt=group.attempt,
        prompt_index=group.prompt_index,
        temperature=group.temperature,
        part=0,
        num_parts=1,
        num_samples=len(group.samples),
        finished_at=group.finished_at,
    )


def _encode_parts(
    group: SampleGroup, message: sample_pb2.SampleGroup, max_payload_bytes: int
) -> list[EncodedPart]:
    header = _header_to_proto(group)
    # The largest possible values, so that no header is larger than the one whose size is computed.
    header.part = header.num_parts = len(group.samples)
    chunks = _split(
        message.samples, max_payload_bytes - header.ByteSize(), group.group_id, max_payload_bytes
    )
    parts = []
    for part, chunk in enumerate(chunks):
        header.part, header.num_parts = part, len(chunks)
        del header.samples[:]
        header.samples.extend(chunk)
        parts.append(
            EncodedPart(
                f"{group.group_id}:{group.attempt}:{part}",
                header.SerializeToString(deterministic=True),
            )
        )
    return parts


def _split(
    samples: Sequence[sample_pb2.Sample], budget_bytes: int, group_id: str, max_payload_bytes: int
) -> list[list[sample_pb2.Sample]]:
    """Splits consecutive samples into chunks that fit into `budget_bytes` each."""
    chunks: list[list[sample_pb2.Sample]] = [[]]
    used_bytes = 0
    for sample in samples:
        size = sample.ByteSize() + _SAMPLE_OVERHEAD_BYTES
        if size > budget_bytes:
            raise PermanentError(
                f"group {group_id}: sample {sample.index} takes {size} bytes, more than fit into "
                "the stream's payload limit "
                f"of {max_payload_bytes}: raise the server's max_payload or lower "
                "task.sampling.maxTokens"
            )
        if used_bytes + size > budget_bytes:
            chunks.append([])
            used_bytes = 0
        chunks[-1].append(sample)
        used_bytes += size
    return chunks


def _fill_sample(message: sample_pb2.Sample, sample: Sample) -> None:
    lengths = sample.segment_lengths
    num_sampled = sum(lengths[1::2])
    num_in_runs = sum([run.num_tokens for run in sample.version_runs])
    if (
        len(sample.token_ids_S) != sum(lengths)
        or len(sample.logprobs_T) != num_sampled
        or num_in_runs != num_sampled
    ):
        raise ValueError(
            f"sample {sample.index}: segments {lengths} do not fit {len(sample.token_ids_S)} token "
            "ids, "
            f"{len(sample.logprobs_T)} log-probabilities and version runs over {num_in_runs} tokens"
        )
    message.index = sample.index
    message.token_ids = to_bytes(sample.token_ids_S, UINT32)
    message.segment_lengths.extend(lengths)
    message.logprobs = to_bytes(sample.logprobs_T, FLOAT32)
    for run in sample.version_runs:
        message.version_runs.add(policy_version=run.policy_version, num_tokens=run.num_tokens)
    message.reward = sample.reward
    message.finish_reason = cast("sample_pb2.FinishReason.ValueType", int(sample.finish_reason))
    if sample.metrics:
        message.metrics.update(sample.metrics)


def decode_part(payload: bytes) -> GroupPart:
    """Decodes one message from the stream. Raises MalformedMessage, whose `reason` names the fault
    in a word.
    """
    try:
        message = sample_pb2.SampleGroup.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage(
            f"{len(payload)} bytes are not a SampleGroup: {error}", "unparsable"
        ) from error
    if message.schema_version != SCHEMA_VERSION:
        raise MalformedMessage(
            f"schema_version={message.schema_version}, this reader knows {SCHEMA_VERSION}",
            "schema_version",
        )
    _check_header(message)
    samples = tuple([_sample_from_proto(sample) for sample in message.samples])
    header = SampleGroup(
        job=message.job,
        group_id=GroupId(message.group_id),
        attempt=message.attempt,
        prompt_index=message.prompt_index,
        temperature=message.temperature,
        samples=samples,
        finished_at=message.finished_at,
    )
    return GroupPart(
        header, part=message.part, num_parts=message.num_parts, num_samples=message.num_samples
    )


def _check_header(message: sample_pb2.SampleGroup) -> None:
    name = f"group {message.group_id!r}"
    here, total = len(message.samples), message.num_samples
    part, num_parts = message.part, message.num_parts
    if not message.group_id:
        raise MalformedMessage("group_id is empty", "group_id")
    if not message.job:
        raise MalformedMessage(f"{name}: job is empty", "job")
    if here == 0:
        raise MalformedMessage(f"{name}: no samples", "empty")
    if here > total:
        raise MalformedMessage(
            f"{name}: {here} samples in a part of a group of num_samples={total}", "num_samples"
        )
    if part >= num_parts:
        raise MalformedMessage(f"{name}: part={part} is not below num_parts={num_parts}", "parts")
    if num_parts > total:
        raise MalformedMessage(
            f"{name}: num_parts={num_parts} is more than num_samples={total}", "parts"
        )
    if num_parts == 1 and here != total:
        raise MalformedMessage(
            f"{name}: {here} samples in the only part, num_samples={total}", "num_samples"
        )
    if not 0 < message.temperature < math.inf:
        raise MalformedMessage(
            f"{name}: temperature={message.temperature} must be above 0 and finite", "temperature"
        )


def _sample_from_proto(message: sample_pb2.Sample) -> Sample:
    token_ids_S = from_bytes(message.token_ids, UINT32, "token_ids")
    logprobs_T = from_bytes(message.logprobs, FLOAT32, "logprobs")
    lengths = tuple(message.segment_lengths)
    if not lengths or lengths[0] == 0:
        raise MalformedMessage(f"sample {message.index}: no prompt, segments={lengths}", "segments")
    num_sampled = sum(lengths[1::2])
    if len(token_ids_S) != sum(lengths) or len(logprobs_T) != num_sampled:
        raise MalformedMessage(
            f"sample {message.index}: {len(token_ids_S)} token ids, {len(logprobs_T)} logprobs, "
            f"segments={lengths}",
            "segments",
        )
    try:
        finish_reason = FinishReason(message.finish_reason)
    except ValueError as error:
        raise MalformedMessage(
            f"sample {message.index}: finish_reason={message.finish_reason} is unknown",
            "finish_reason",
        ) from error
    return Sample(
        index=message.index,
        token_ids_S=token_ids_S,
        segment_lengths=lengths,
        logprobs_T=logprobs_T,
        version_runs=runs_from_proto(message.version_runs, num_sampled),
        reward=message.reward,
        finish_reason=finish_reason,
        metrics=dict(message.metrics),
    )


def whole(header: SampleGroup, samples: Sequence[Sample]) -> SampleGroup:
    """The group of `header` with all its samples in the order of their indices. Raises
    MalformedMessage unless they make a group.
    """
    if not any([len(sample.logprobs_T) for sample in samples]):
        raise MalformedMessage(f"group {header.group_id}: no sampled token in any sample", "empty")
    indices = [sample.index for sample in samples]
    if len(set(indices)) != len(indices):
        raise MalformedMessage(
            f"group {header.group_id}: two samples with the same index", "sample_index"
        )
    if indices == sorted(indices) and samples is header.samples:
        return header
    return replace(header, samples=tuple(sorted(samples, key=lambda sample: sample.index)))


class PartKey(NamedTuple):
    """The key that the parts of one group share."""

    group_id: str
    attempt: int


class GroupJoiner:
    """Collects parts until their group is whole. Groups of one part pass without being stored.

    Bounded: beyond `max_groups` incomplete groups or `max_tokens` in them the oldest is evicted,
    and so is an attempt when a part of a newer one arrives (its actor has died). `num_evicted`
    counts evictions, `on_evict` receives the lost parts.
    """

    def __init__(
        self,
        max_groups: int = 1024,
        max_tokens: int = 1 << 25,
        on_evict: Callable[[PartKey, list[GroupPart]], None] | None = None,
    ) -> None:
        self._max_groups = max_groups
        self._max_tokens = max_tokens
        self._on_evict = on_evict
        self._waiting: dict[PartKey, dict[int, GroupPart]] = {}
        self._num_tokens = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        """Number of incomplete groups."""
        return len(self._waiting)

    def add(self, part: GroupPart) -> SampleGroup | None:
        """Returns the whole group when this was its last missing part. A part that is already
        stored replaces itself.

        Raises MalformedMessage when the part contradicts those before it; the incomplete group
        stays as it was. It is also raised when all parts are there and make no group; then those
        before are evicted.
        """
        if part.num_parts == 1:
            return whole(part.header, part.header.samples)
        key = PartKey(part.header.group_id, part.header.attempt)
        for older in [
            each
            for each in self._waiting
            if each.group_id == key.group_id and each.attempt < key.attempt
        ]:
            self._evict(older)
        parts = self._waiting.setdefault(key, {})
        if parts:
            _check_agreement(part, next(iter(parts.values())))
        replaced = parts.pop(part.part, None)
        self._num_tokens -= 0 if replaced is None else _num_tokens(replaced)
        if len(parts) + 1 == part.num_parts:
            return self._joined(key, part)
        parts[part.part] = part
        self._num_tokens += _num_tokens(part)
        self._make_room(key)
        return None

    def _joined(self, key: PartKey, last: GroupPart) -> SampleGroup:
        parts = {**self._waiting[key], last.part: last}
        samples = [
            sample for number in range(last.num_parts) for sample in parts[number].header.samples
        ]
        total = last.num_samples
        try:
            if len(samples) != total:
                raise MalformedMessage(
                    f"group {key.group_id}: {len(samples)} samples, num_samples={total}",
                    "num_samples",
                )
            group = whole(last.header, samples)
        except MalformedMessage:
            self._evict(key)
            raise
        self.discard(key)
        return group

    def discard(self, key: PartKey) -> list[GroupPart]:
        """Removes an incomplete group, if it is there, and returns its parts."""
        parts = list(self._waiting.pop(key, {}).values())
        self._num_tokens -= sum(_num_tokens(part) for part in parts)
        return parts

    def _make_room(self, newest: PartKey) -> None:
        while len(self._waiting) > self._max_groups or self._num_tokens > self._max_tokens:
            oldest = next(iter(self._waiting))
            if oldest == newest:
                return
            self._evict(oldest)

    def _evict(self, key: PartKey) -> None:
        parts = self.discard(key)
        self.num_evicted += 1
        if self._on_evict is not None:
            self._on_evict(key, parts)


def _check_agreement(part: GroupPart, other: GroupPart) -> None:
    def facts(each: GroupPart) -> tuple[object, ...]:
        header = each.header
        return header.job, header.prompt_index, header.temperature, each.num_parts, each.num_samples

    if facts(part) != facts(other):
        raise MalformedMessage(
            f"group {part.header.group_id}: parts {part.part} and {other.part} disagree on (job, "
            "prompt_index, temperature, "
            f"num_parts, num_samples): {facts(part)} and {facts(other)}",
            "parts",
        )


def _num_tokens(part: GroupPart) -> int:
    return sum(len(sample.token_ids_S) for sample in part.header.samples)
