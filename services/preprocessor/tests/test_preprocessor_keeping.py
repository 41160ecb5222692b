"""Small keepers: ring buffer, sessions, counters, trained.jsonl, bell."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocessor_harness import make_job

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.metrics.catalog import DROP_REASONS
from pipelinerl_common.metrics.catalog import LAYERS as STALE_LAYERS
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import DropReason, Group, make_group_id
from pipelinerl_preprocessor.leases import Sessions
from pipelinerl_preprocessor.live import Broadcast, RingBuffer
from pipelinerl_preprocessor.loop import policy_of, ring_buffer_groups
from pipelinerl_preprocessor.metrics import LAYERS, PreprocessorCounters
from pipelinerl_preprocessor.run_log import TrainedLog


def test_the_ring_buffer_lets_the_oldest_go() -> None:
    buffer = RingBuffer(2)
    assert [buffer.add(text) for text in ("a", "b", "c")] == [None, None, "a"]
    assert ("a" in buffer, "b" in buffer, len(buffer)) == (False, True, 2)
    buffer.discard("b")
    buffer.discard("b")
    assert len(buffer) == 1


@settings(deadline=None)
@given(room=st.integers(1, 5), ids=st.lists(st.integers(0, 50), unique=True))
def test_the_ring_buffer_keeps_the_newest(room: int, ids: list[int]) -> None:
    buffer = RingBuffer(room)
    gone = [buffer.add(str(each)) for each in ids]
    kept = [str(each) for each in ids if str(each) in buffer]
    assert kept == [str(each) for each in ids[-room:]]
    assert [each for each in gone if each is not None] == [
        str(each) for each in ids[: len(ids) - len(kept)]
    ]


@pytest.mark.parametrize(
    ("staleness", "wanted", "least"),
    [
        ({"policy": "areal", "eta": 3}, 3, 4),
        ({"policy": "conventional", "stepsPerGeneration": 4}, 15, 16),
    ],
)
def test_a_ring_buffer_in_which_no_batch_can_form_is_refused(
    staleness: dict[str, object], wanted: int, least: int
) -> None:
    def groups(size: int | None) -> int:
        spec = make_job(
            algorithm={"groupsPerStep": 4},
            staleness=staleness,
            preprocessor={"ringBufferGroups": size},
        ).spec
        return ring_buffer_groups(spec, policy_of(spec))

    with pytest.raises(
        SettingsError, match=f"ringBufferGroups={wanted} is too small.*needs {least} waiting"
    ):
        groups(wanted)
    assert groups(least) == least
    assert groups(None) == 16


def test_a_penalty_for_every_completion_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"penaltyBufferTokens=33 .*maxTokens=32"):
        make_job(algorithm={"overlong": {"penaltyBufferTokens": 33}})


def test_sessions_are_replaced_and_forgotten() -> None:
    sessions = Sessions(forget_s=10.0)
    assert sessions.seen("a", "1", now=0.0)
    assert not sessions.seen("a", "1", now=1.0)
    assert sessions.seen("a", "2", now=2.0)
    assert (
        sessions.is_current("a", "1"),
        sessions.is_current("a", "2"),
        sessions.is_current("b", "9"),
    ) == (False, True, True)
    sessions.forget_silent(now=11.9)
    assert len(sessions) == 1
    sessions.forget_silent(now=12.0)
    assert len(sessions) == 0


def test_reasons_from_outside_are_words_and_bounded() -> None:
    metrics = Metrics("preprocessor", "test")
    counters = PreprocessorCounters(metrics)
    counters.dropped("verifier_timeout", 5, 0)
    counters.dropped("stale", 16, 2)
    counters.wasted("cancelled", 3)
    for strange in ("", "Bad Reason", "x" * 50, *(f"reason_{number}" for number in range(100))):
        counters.dropped(strange, 1, 0)
    values = metrics.values()
    assert values["groups_dropped_total{reason=verifier_timeout}"] == 1
    assert values["tokens_dropped_total{reason=verifier_timeout}"] == 5
    assert values["samples_dropped_total{reason=stale}"] == 2
    assert values["tokens_dropped_total{reason=cancelled}"] == 3
    assert values["groups_dropped_total{reason=other}"] >= 3
    groups = [value for name, value in values.items() if name.startswith("groups_dropped_total")]
    assert sum(groups) == 105
    assert len(groups) <= 65


def test_drops_of_the_staleness_policy_are_counted_by_its_layers() -> None:
    metrics = Metrics("preprocessor", "test")
    counters = PreprocessorCounters(metrics)
    counters.dropped("cancelled", 0, 0)
    counters.wasted("cancelled", 7)
    counters.dropped("stale", 16, 2)
    counters.dropped("expired", 9, 0)
    stale = {name: value for name, value in metrics.values().items() if name.startswith("stale_")}
    assert stale == {
        "stale_groups_total{layer=running}": 1,
        "stale_groups_total{layer=assembly}": 1,
        "stale_tokens_total{layer=running}": 7,
        "stale_tokens_total{layer=assembly}": 16,
    }


def test_trained_groups_count_by_the_age_of_their_oldest_token() -> None:
    metrics = Metrics("preprocessor", "test")
    groups = [Group(make_group_id(0, number), number, number) for number in range(3)]
    groups[0].first_versions, groups[1].first_versions = (4, 2), (5, 5)
    PreprocessorCounters(metrics).trained(5, groups)
    values = metrics.values()
    assert values["groups_trained_total"] == 3
    assert (values["staleness_steps_count"], values["staleness_steps_sum"]) == (2, 3)


def test_the_catalog_knows_every_reason_and_layer() -> None:
    assert set(DROP_REASONS) == set(DropReason)
    assert set(STALE_LAYERS) == set(LAYERS.values())


def test_resident_memory_is_told() -> None:
    assert memory_bytes() > 1e6


def test_trained_lines_are_cut_at_a_rewind(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "new" / "trained.jsonl")
    log.rewind(0)
    for step in range(3):
        log.append(step, 0, [Group(GroupId(f"0-{step}"), step, 10 + step)])
    with log.path.open("a") as file:
        file.write('{"step": 1, "gro')
    log.rewind(2)
    log.append(2, 1, [Group(GroupId("1-0"), 0, 12)])
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(line["step"], line["incarnation"], line["groups"][0]["prompt_index"]) for line in lines] == [
        (0, 0, 10), (1, 0, 11), (2, 1, 12),
    ]  # fmt: skip


def test_a_line_that_a_full_disk_cut_off_costs_no_other(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "trained.jsonl")
    log.append(0, 0, [])
    with log.path.open("a") as file:
        file.write('{"step": 1, "gro')
    log.append(2, 0, [])
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0, 2]


async def test_a_bell_wakes_all_who_wait_now() -> None:
    bell = Broadcast()
    bell.ring()
    assert not await bell.wait(0.0)
    assert not await bell.wait(0.01)
    waiters = [asyncio.create_task(bell.wait(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    bell.ring()
    assert await asyncio.gather(*waiters) == [True, True, True]
