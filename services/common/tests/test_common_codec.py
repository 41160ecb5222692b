"""Sample groups and micro-batches on the wire: round trips, sizes, golden bytes of every schema
version, every broken case.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common_fakes import facts, make_group, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.v1 import admission_pb2, batches_pb2, sample_pb2
from pipelinerl_common.codec import (
    GroupJoiner,
    GroupPart,
    PartKey,
    decode_part,
    encode_group,
    micro_batch_from_proto,
    micro_batch_to_proto,
    plan_from_proto,
    plan_to_proto,
)
from pipelinerl_common.errors import MalformedMessage, PermanentError
from pipelinerl_common.types import (
    FinishReason,
    GroupId,
    MicroBatch,
    Sample,
    SampleGroup,
    StepPlan,
    VersionRun,
)

GOLDEN = Path(__file__).parent / "golden"
MEBIBYTE = 1 << 20

float32s = st.floats(width=32, allow_nan=False)


@st.composite
def samples(draw: st.DrawFn, index: int) -> Sample:
    given_length = draw(st.integers(1, 12))
    segment_lengths = (given_length, *draw(st.lists(st.integers(0, 9), max_size=5)))
    num_tokens, num_sampled = sum(segment_lengths), sum(segment_lengths[1::2])
    cuts = (
        sorted(draw(st.sets(st.integers(1, num_sampled - 1), max_size=4)))
        if num_sampled > 1
        else []
    )
    bounds = [0, *cuts, num_sampled] if num_sampled else [0]
    versions = draw(
        st.lists(st.integers(0, 2**40), min_size=len(bounds) - 1, max_size=len(bounds) - 1)
    )
    return Sample(
        index=index,
        token_ids_S=np.array(
            draw(st.lists(st.integers(0, 2**32 - 1), min_size=num_tokens, max_size=num_tokens)),
            np.uint32,
        ),
        segment_lengths=segment_lengths,
        logprobs_T=np.array(
            draw(st.lists(float32s, min_size=num_sampled, max_size=num_sampled)), np.float32
        ),
        version_runs=tuple(
            VersionRun(version, end - start)
            for version, start, end in zip(versions, bounds, bounds[1:], strict=False)
        ),
        reward=draw(float32s),
        finish_reason=draw(st.sampled_from(FinishReason)),
        metrics=draw(st.dictionaries(st.text(max_size=8), float32s, max_size=3)),
    )


@st.composite
def groups(draw: st.DrawFn) -> SampleGroup:
    indices = sorted(draw(st.sets(st.integers(0, 63), min_size=1, max_size=6)))
    drawn = [draw(samples(index)) for index in indices]
    if not any(sample.num_sampled for sample in drawn):
        drawn[0] = make_sample(indices[0])
    return SampleGroup(
        job=draw(st.text(min_size=1, max_size=8)),
        group_id=GroupId(draw(st.text(min_size=1, max_size=8))),
        attempt=draw(st.integers(0, 1000)),
        prompt_index=draw(st.integers(0, 2**63)),
        temperature=draw(st.floats(0.0625, 8, width=32)),
        samples=tuple(drawn),
        finished_at=draw(st.floats(0, 2e9)),
    )


def join(payloads: list[bytes]) -> SampleGroup | None:
    joiner = GroupJoiner()
    joined = [
        group for payload in payloads if (group := joiner.add(decode_part(payload))) is not None
    ]
    assert len(joiner) == (0 if joined else 1)
    return joined[0] if joined else None


@settings(deadline=None)
@given(groups(), st.randoms())
def test_any_group_survives_the_wire_split_and_in_any_order(
    group: SampleGroup, random: Any
) -> None:
    whole = encode_group(group, MEBIBYTE)
    assert len(whole) == 1
    assert whole[0].message_id == f"{group.group_id}:{group.attempt}:0"
    restored = join([whole[0].payload])
    assert restored is not None
    assert facts(restored) == facts(group)

    smallest = (
        max(
            len(encode_group(replace(group, samples=(sample,)), MEBIBYTE)[0].payload)
            for sample in group.samples
        )
        + 16
    )
    parts = encode_group(group, smallest)
    assert all(len(part.payload) <= smallest for part in parts)
    assert len({part.message_id for part in parts}) == len(parts)
    payloads = [part.payload for part in parts]
    random.shuffle(payloads)
    rejoined = join(payloads)
    assert rejoined is not None
    assert facts(rejoined) == facts(group)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_malformed_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_part(data)


@settings(deadline=None)
@given(st.data())
def test_flipped_bytes_are_decoded_within_the_invariants_or_malformed(data: st.DataObject) -> None:
    payload = bytearray(encode_group(make_group(), MEBIBYTE)[0].payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        part = decode_part(bytes(payload))
    except MalformedMessage:
        return
    for sample in part.header.samples:
        assert sum(sample.segment_lengths) == len(sample.token_ids_S)
        assert sum(sample.segment_lengths[1::2]) == len(sample.logprobs_T)
        assert sum(run.num_tokens for run in sample.version_runs) == len(sample.logprobs_T)


def test_a_token_costs_at_most_12_bytes_in_a_group_of_realistic_size() -> None:
    group = make_group(num_samples=8, segment_lengths=(100, 200))
    payload = encode_group(group, MEBIBYTE)[0].payload
    num_prompt, num_sampled = 8 * 100, 8 * 200
    overhead = len(payload) - 4 * num_prompt - 8 * num_sampled
    assert overhead <= 64 + 8 * 64
    assert len(payload) / (num_prompt + num_sampled) < 12


def test_decoding_is_free_of_copies_into_python_objects() -> None:
    sample = decode_part(encode_group(make_group(), MEBIBYTE)[0].payload).header.samples[0]
    assert sample.token_ids_S.dtype == np.uint32
    assert sample.logprobs_T.dtype == np.float32
    assert not sample.token_ids_S.flags.owndata


def test_parts_say_what_they_are_parts_of() -> None:
    group = make_group(num_samples=5, segment_lengths=(100, 100))
    one = len(encode_group(replace(group, samples=group.samples[:1]), MEBIBYTE)[0].payload)
    decoded = [decode_part(part.payload) for part in encode_group(group, 2 * one + 16)]
    assert [(part.part, part.num_parts, part.num_samples) for part in decoded] == [
        (0, 3, 5),
        (1, 3, 5),
        (2, 3, 5),
    ]
    assert [[sample.index for sample in part.header.samples] for part in decoded] == [
        [0, 1],
        [2, 3],
        [4],
    ]


def test_a_sample_over_the_limit_is_a_permanent_error_with_the_remedy() -> None:
    with pytest.raises(
        PermanentError, match=r"group 0-0: sample 0 takes \d+ bytes.*limit of 1000: raise"
    ):
        encode_group(make_group(segment_lengths=(100, 200)), 1000)


def _wrong_logprobs(sample: Sample) -> Sample:
    return replace(sample, logprobs_T=sample.logprobs_T[:-1])


def _wrong_runs(sample: Sample) -> Sample:
    return replace(sample, version_runs=(VersionRun(6, 2),))


def _wrong_tokens(sample: Sample) -> Sample:
    return replace(sample, token_ids_S=sample.token_ids_S[:-1])


@pytest.mark.parametrize("break_sample", [_wrong_logprobs, _wrong_runs, _wrong_tokens])
def test_broken_groups_are_not_sent(break_sample: Callable[[Sample], Sample]) -> None:
    group = make_group()
    broken = replace(group, samples=(break_sample(group.samples[0]), group.samples[1]))
    with pytest.raises(ValueError, match="sample 0: segments"):
        encode_group(broken, MEBIBYTE)


@pytest.mark.parametrize("changes", [{"samples": ()}, {"group_id": ""}])
def test_empty_groups_are_not_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs an id and a sample"):
        encode_group(replace(make_group(), **changes), MEBIBYTE)


def break_message(**changes: Any) -> Callable[[sample_pb2.SampleGroup], None]:
    def apply(message: sample_pb2.SampleGroup) -> None:
        for name, value in changes.items():
            setattr(message, name, value)

    return apply


def break_sample(**changes: Any) -> Callable[[sample_pb2.SampleGroup], None]:
    def apply(message: sample_pb2.SampleGroup) -> None:
        for name, value in changes.items():
            if isinstance(value, list):
                del getattr(message.samples[1], name)[:]
                getattr(message.samples[1], name).extend(value)
            else:
                setattr(message.samples[1], name, value)

    return apply


def no_samples(message: sample_pb2.SampleGroup) -> None:
    del message.samples[:]


def no_sampled_token(message: sample_pb2.SampleGroup) -> None:
    for sample in message.samples:
        sample.logprobs = b""
        del sample.version_runs[:]
        sample.segment_lengths[:] = [7]


def run(version: int, num_tokens: int) -> sample_pb2.VersionRun:
    return sample_pb2.VersionRun(policy_version=version, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("broken", "reason", "says"),
    [
        (
            break_message(schema_version=0),
            "schema_version",
            "schema_version=0, this reader knows 1",
        ),
        (break_message(schema_version=2), "schema_version", "schema_version=2"),
        (break_message(group_id=""), "group_id", "empty"),
        (break_message(job=""), "job", "empty"),
        (break_message(num_samples=0), "num_samples", "num_samples=0"),
        (
            break_message(num_samples=1),
            "num_samples",
            "2 samples in a part of a group of num_samples=1",
        ),
        (break_message(num_samples=3), "num_samples", "2 samples in the only part, num_samples=3"),
        (break_message(part=1), "parts", "part=1 is not below num_parts=1"),
        (break_message(num_parts=0), "parts", "num_parts=0"),
        (break_message(num_parts=3), "parts", "num_parts=3 is more than num_samples=2"),
        (break_message(temperature=0.0), "temperature", "temperature=0"),
        (break_message(temperature=-1.0), "temperature", "temperature=-1"),
        (break_message(temperature=float("nan")), "temperature", "temperature=nan"),
        (break_message(temperature=float("inf")), "temperature", "temperature=inf"),
        (no_samples, "empty", "no samples"),
        (no_sampled_token, "empty", "no sampled token"),
        (break_sample(index=0), "sample_index", "same index"),
        (
            break_sample(token_ids=bytes(27)),
            "column",
            "token_ids has 27 bytes, not a multiple of 4",
        ),
        (break_sample(logprobs=bytes(11)), "column", "logprobs has 11 bytes"),
        (break_sample(token_ids=bytes(24)), "segments", "6 token ids"),
        (break_sample(logprobs=bytes(16)), "segments", "4 logprobs"),
        (break_sample(segment_lengths=[]), "segments", "no prompt"),
        (break_sample(segment_lengths=[0, 3, 4]), "segments", "no prompt"),
        (break_sample(segment_lengths=[4, 2]), "segments", "segments=(4, 2)"),
        (break_sample(segment_lengths=[3, 4]), "segments", "3 logprobs, segments=(3, 4)"),
        (break_sample(version_runs=[]), "version_runs", "add up to 0 tokens instead of 3"),
        (break_sample(version_runs=[run(6, 4)]), "version_runs", "add up to 4 tokens instead of 3"),
        (break_sample(version_runs=[run(6, 3), run(7, 0)]), "version_runs", "the length 1 or more"),
        (break_sample(version_runs=[run(-1, 3)]), "version_runs", "the version must be 0 or more"),
        (break_sample(finish_reason=0), "finish_reason", "finish_reason=0 is unknown"),
        (break_sample(finish_reason=9), "finish_reason", "finish_reason=9 is unknown"),
    ],
)
def test_every_broken_message_is_malformed_with_its_reason(
    broken: Callable[[sample_pb2.SampleGroup], None], reason: str, says: str
) -> None:
    message = sample_pb2.SampleGroup.FromString(encode_group(make_group(), MEBIBYTE)[0].payload)
    broken(message)
    with pytest.raises(MalformedMessage) as caught:
        GroupJoiner().add(decode_part(message.SerializeToString()))
    assert caught.value.reason == reason
    assert says in str(caught.value)


def test_non_finite_numbers_are_for_the_reader_to_judge() -> None:
    group = make_group(num_samples=1)
    odd = replace(
        group.samples[0], reward=float("nan"), logprobs_T=np.array([-np.inf, np.nan, 0], np.float32)
    )
    part = decode_part(encode_group(replace(group, samples=(odd,)), MEBIBYTE)[0].payload)
    assert np.isnan(part.header.samples[0].reward)


def parts_of(group: SampleGroup, sizes: tuple[int, ...]) -> list[GroupPart]:
    parts, start = [], 0
    for number, size in enumerate(sizes):
        header = replace(group, samples=group.samples[start : start + size])
        parts.append(GroupPart(header, number, len(sizes), len(group.samples)))
        start += size
    return parts


def test_a_repeated_part_replaces_itself() -> None:
    first, second = parts_of(make_group(num_samples=3), (2, 1))
    joiner = GroupJoiner()
    assert joiner.add(first) is None
    assert joiner.add(first) is None
    joined = joiner.add(second)
    assert joined is not None
    assert [sample.index for sample in joined.samples] == [0, 1, 2]
    assert joiner.num_evicted == 0


@pytest.mark.parametrize(
    ("change", "reason", "num_left"),
    [
        (lambda part: replace(part, num_samples=4), "parts", 1),
        (lambda part: replace(part, num_parts=3), "parts", 1),
        (lambda part: replace(part, header=replace(part.header, temperature=1.0)), "parts", 1),
        (lambda part: replace(part, header=replace(part.header, job="other")), "parts", 1),
        (
            lambda part: replace(part, header=replace(part.header, samples=(make_sample(0),))),
            "sample_index",
            0,
        ),
        (
            lambda part: replace(
                part, header=replace(part.header, samples=(make_sample(2), make_sample(3)))
            ),
            "num_samples",
            0,
        ),
    ],
)
def test_parts_that_contradict_each_other_are_malformed(
    change: Callable[[GroupPart], GroupPart], reason: str, num_left: int
) -> None:
    """Where all parts are there the earlier ones are evicted, since nothing can complete them any
    more.
    """
    first, second = parts_of(make_group(num_samples=3), (2, 1))
    evicted: list[tuple[PartKey, list[GroupPart]]] = []
    joiner = GroupJoiner(on_evict=lambda key, parts: evicted.append((key, parts)))
    assert joiner.add(first) is None
    with pytest.raises(MalformedMessage) as caught:
        joiner.add(change(second))
    assert caught.value.reason == reason
    assert len(joiner) == num_left
    assert evicted == ([] if num_left else [(PartKey("0-0", 1), [first])])


def test_the_joiner_is_bounded_and_counts_what_it_evicts() -> None:
    evicted: list[tuple[PartKey, int]] = []
    joiner = GroupJoiner(
        max_groups=2, on_evict=lambda key, parts: evicted.append((key, len(parts)))
    )
    groups_ = [make_group(sequence, num_samples=3) for sequence in range(4)]
    for group in groups_:
        joiner.add(parts_of(group, (2, 1))[0])
    assert evicted == [(PartKey("0-0", 1), 1), (PartKey("0-1", 1), 1)]
    assert joiner.num_evicted == 2
    assert len(joiner) == 2
    assert joiner.add(parts_of(groups_[3], (2, 1))[1]) is not None


def test_the_joiner_is_bounded_in_tokens() -> None:
    joiner = GroupJoiner(max_tokens=50)  # a first part here has 2 * 7 tokens
    for sequence in range(10):
        joiner.add(parts_of(make_group(sequence, num_samples=3), (2, 1))[0])
    assert len(joiner) == 3
    assert joiner.num_evicted == 7


def test_a_newer_attempt_evicts_the_older() -> None:
    joiner = GroupJoiner()
    older = make_group(num_samples=3)
    joiner.add(parts_of(older, (2, 1))[0])
    first, second = parts_of(replace(older, attempt=2), (2, 1))
    joiner.add(first)
    assert joiner.num_evicted == 1
    joined = joiner.add(second)
    assert joined is not None
    assert joined.attempt == 2


def make_micro_batch(**changes: Any) -> MicroBatch:
    batch = MicroBatch(
        index=3,
        sequence_lengths=(5, 3),
        input_ids_L=np.arange(10, dtype=np.uint32),
        loss_mask_L=np.array([0, 0, 1, 1, 1, 0, 1, 1, 0, 0], np.uint8),
        old_logprobs_L=(-np.arange(10) / 4).astype(np.float32),
        advantages_L=(np.arange(10) / 8).astype(np.float32),
        ref_logprobs_L=(-np.arange(10) / 16).astype(np.float32),
        returns_L=None,
        rewards=(1.0, 0.0),
        sequence_weights=(1.0, 0.5),
        version_runs=(VersionRun(4, 3), VersionRun(5, 2)),
        temperature=0.5,
        group_numbers=(0, 1),
    )
    return replace(batch, **changes)


def batch_facts(batch: MicroBatch) -> dict[str, Any]:
    values = {name: getattr(batch, name) for name in MicroBatch.__dataclass_fields__}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


@pytest.mark.parametrize(
    "changes", [{}, {"ref_logprobs_L": None, "returns_L": np.ones(10, np.float32)}]
)
def test_micro_batches_survive_the_wire(changes: dict[str, Any]) -> None:
    batch = make_micro_batch(**changes)
    message = batches_pb2.MicroBatch.FromString(micro_batch_to_proto(batch).SerializeToString())
    assert batch_facts(micro_batch_from_proto(message)) == batch_facts(batch)


def test_a_filler_row_survives_the_wire() -> None:
    nothing = np.zeros(10, np.float32)
    filler = make_micro_batch(
        sequence_lengths=(),
        loss_mask_L=np.zeros(10, np.uint8),
        old_logprobs_L=nothing,
        advantages_L=nothing,
        rewards=(),
        sequence_weights=(),
        version_runs=(),
        group_numbers=(),
    )
    assert batch_facts(micro_batch_from_proto(micro_batch_to_proto(filler))) == batch_facts(filler)


def test_a_column_of_the_wrong_length_is_not_sent() -> None:
    with pytest.raises(ValueError, match="9 items beside 10 slots"):
        micro_batch_to_proto(make_micro_batch(advantages_L=np.zeros(9, np.float32)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": bytes(36)}, "column"),
        ({"loss_mask": bytes(9)}, "column"),
        ({"old_logprobs": bytes(44)}, "column"),
        ({"advantages": b""}, "column"),
        ({"ref_logprobs": bytes(4)}, "column"),
        ({"returns": bytes(4)}, "column"),
        ({"returns": bytes(41)}, "column"),
        ({"loss_mask": bytes([0, 0, 2, 1, 1, 0, 1, 1, 0, 0])}, "loss_mask"),
        ({"loss_mask": bytes([0, 0, 1, 1, 1, 0, 1, 0, 0, 1])}, "loss_mask"),
        ({"loss_mask": bytes([0, 0, 1, 1, 1, 0, 1, 0, 0, 0])}, "version_runs"),
        ({"sequence_lengths": [5, 6]}, "sequence_lengths"),
        ({"sequence_lengths": [5, 3, 0]}, "sequence_lengths"),
        ({"rewards": [1.0]}, "rewards"),
        ({"sequence_weights": []}, "sequence_weights"),
        ({"group_numbers": [0, 1, 2]}, "group_numbers"),
        ({"num_slots": 11}, "column"),
    ],
)
def test_every_broken_micro_batch_is_malformed(changes: dict[str, Any], reason: str) -> None:
    message = micro_batch_to_proto(make_micro_batch())
    for name, value in changes.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(MalformedMessage) as caught:
        micro_batch_from_proto(message)
    assert caught.value.reason == reason


def make_plan() -> StepPlan:
    return StepPlan(
        step=7,
        batch_id="7-a",
        group_ids=(GroupId("0-1"), GroupId("0-4")),
        num_micro_batches=2,
        num_sequences=16,
        num_trained_tokens=812,
        publish_after=True,
        metrics={"reward_mean": 0.5},
    )


def test_plans_survive_the_wire() -> None:
    assert plan_from_proto(plan_to_proto(make_plan())) == make_plan()


@pytest.mark.parametrize("changes", [{"step": -1}, {"batch_id": ""}, {"num_micro_batches": 0}])
def test_broken_plans_are_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="step plan"):
        plan_from_proto(plan_to_proto(replace(make_plan(), **changes)))


def golden(name: str, current: bytes) -> bytes:
    """The committed bytes. PIPELINERL_WRITE_GOLDEN=1 writes those that are missing; a released
    version's are never changed.
    """
    path = GOLDEN / name
    if not path.exists() and os.environ.get("PIPELINERL_WRITE_GOLDEN") == "1":
        path.write_bytes(current)
    return path.read_bytes()


def test_schema_version_1_of_sample_groups_stays_readable_and_is_what_is_written() -> None:
    group = replace(
        make_group(sequence=17, num_samples=2),
        samples=(make_sample(0), make_sample(1, (4, 3, 2, 1), version=9)),
    )
    written = encode_group(group, MEBIBYTE)[0].payload
    committed = golden("sample_group_v1.bin", written)
    assert facts(decode_part(committed).header) == facts(group)
    assert written == committed


def test_version_1_of_micro_batches_stays_readable_and_is_what_is_written() -> None:
    written = micro_batch_to_proto(make_micro_batch()).SerializeToString(deterministic=True)
    committed = golden("micro_batch_v1.bin", written)
    assert batch_facts(
        micro_batch_from_proto(batches_pb2.MicroBatch.FromString(committed))
    ) == batch_facts(make_micro_batch())
    assert written == committed


# What actors and the preprocessor say to one another


def admission_message() -> admission_pb2.ReportRequest:
    """A report with a generator's load and a group that is handed back half sampled."""
    load = admission_pb2.GeneratorLoad(
        generator="http://127.0.0.1:8000", kv_usage=0.25, kv_tokens=65536, num_running=12,
        num_waiting=3, preemptions_total=2, steps_total=1000, step_seconds_total=8.5,
        step_tokens_total=9000, prefill_tokens_total=450, running_seconds_total=77.5,
        kv_usage_seconds_total=2.25, kv_block_tokens=16, requested_seconds_total=80.5,
        answered_total=64,
    )  # fmt: skip
    runs = [
        sample_pb2.VersionRun(policy_version=3, num_tokens=2),
        sample_pb2.VersionRun(policy_version=4, num_tokens=1),
    ]
    answers = [
        admission_pb2.PartialAnswer(
            sample_index=0, token_ids=[5, 9, 300], logprobs=[-0.5, -1.25, 0.0], version_runs=runs,
        ),
        admission_pb2.PartialAnswer(
            sample_index=2, token_ids=[7], logprobs=[-2.0], version_runs=runs[:1],
            finish_reason=sample_pb2.FINISH_REASON_STOP, text="7",
        ),
    ]  # fmt: skip
    event = admission_pb2.GroupEvent(
        lease_id="0-17:1",
        outcome=admission_pb2.GROUP_OUTCOME_HANDED_BACK,
        partial=admission_pb2.PartialGroup(prompt_token_ids=[4, 8], answers=answers),
    )
    return admission_pb2.ReportRequest(actor_id="actor-0", events=[event], loads=[load])


def test_golden_report_of_an_actor() -> None:
    golden = (GOLDEN / "report_request_v1.bin").read_bytes()
    assert admission_pb2.ReportRequest.FromString(golden) == admission_message()
    assert admission_message().SerializeToString(deterministic=True) == golden
