"""Small keepers: ring buffer, sessions, counters, trained.jsonl, bell."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocessor_harness import make_job

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.telemetry import memory_bytes
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.bell import Bell
from pipelinerl_preprocessor.counters import Counters
from pipelinerl_preprocessor.groups import Group
from pipelinerl_preprocessor.parts import policy_of, ring_buffer_groups
from pipelinerl_preprocessor.ring_buffer import RingBuffer
from pipelinerl_preprocessor.sessions import Sessions
from pipelinerl_preprocessor.trained import TrainedLog


def test_the_ring_buffer_lets_the_oldest_go() -> None:
    buffer = RingBuffer(2)
    assert [buffer.add(text, now) for text, now in (("a", 1.0), ("b", 2.0), ("c", 5.0))] == [None, None, "a"]
    assert ("a" in buffer, "b" in buffer, len(buffer)) == (False, True, 2)
    assert buffer.oldest_age(now=12.0) == 10.0
    buffer.discard("b")
    buffer.discard("b")
    assert buffer.oldest_age(now=12.0) == 7.0
    buffer.discard("c")
    assert buffer.oldest_age(now=12.0) == 0.0


@given(room=st.integers(1, 5), ids=st.lists(st.integers(0, 50), unique=True))
def test_the_ring_buffer_keeps_the_newest(room: int, ids: list[int]) -> None:
    buffer = RingBuffer(room)
    gone = [buffer.add(str(each), float(place)) for place, each in enumerate(ids)]
    kept = [str(each) for each in ids if str(each) in buffer]
    assert kept == [str(each) for each in ids[-room:]]
    assert [each for each in gone if each is not None] == [str(each) for each in ids[: len(ids) - len(kept)]]


@pytest.mark.parametrize(
    ("staleness", "wanted", "least"),
    [({"policy": "areal", "eta": 3}, 3, 4), ({"policy": "conventional", "stepsPerGeneration": 4}, 15, 16)],
)
def test_a_ring_buffer_in_which_no_batch_can_form_is_refused(staleness: dict[str, object], wanted: int, least: int) -> None:
    def groups(size: int | None) -> int:
        spec = make_job(algorithm={"groupsPerStep": 4}, staleness=staleness, preprocessor={"ringBufferGroups": size}).spec
        return ring_buffer_groups(spec, policy_of(spec))

    with pytest.raises(SettingsError, match=f"ringBufferGroups={wanted} is too small.*needs {least} waiting"):
        groups(wanted)
    assert groups(least) == least
    assert groups(None) == 16


def test_a_penalty_for_every_completion_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"penaltyBufferTokens=33 .*maxTokens=32"):
        make_job(algorithm={"overlong": {"penaltyBufferTokens": 33}})


def test_sessions_are_replaced_and_forgotten() -> None:
    sessions = Sessions(forget_s=10.0)
    assert sessions.heard_of("a", "1", now=0.0)
    assert not sessions.heard_of("a", "1", now=1.0)
    assert sessions.heard_of("a", "2", now=2.0)
    assert (sessions.is_current("a", "1"), sessions.is_current("a", "2"), sessions.is_current("b", "9")) == (False, True, True)
    sessions.forget_silent(now=11.9)
    assert len(sessions) == 1
    sessions.forget_silent(now=12.0)
    assert len(sessions) == 0


def test_reasons_from_outside_are_bounded() -> None:
    counters = Counters()
    counters.dropped("verifier_timeout", 5)
    counters.wasted("cancelled", 3)
    for strange in ("", "Bad Reason", "x" * 50, *(f"reason_{number}" for number in range(100))):
        counters.dropped(strange, 1)
    values = counters.values()
    assert values["dropped_verifier_timeout_groups_total"] == 1
    assert values["dropped_verifier_timeout_tokens_total"] == 5
    assert values["dropped_cancelled_tokens_total"] == 3
    assert values["dropped_other_groups_total"] >= 3
    assert sum(value for name, value in values.items() if name.endswith("_groups_total") and name.startswith("dropped")) == 104
    assert len(values) < 110
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


async def test_a_bell_wakes_all_who_wait_now() -> None:
    bell = Bell()
    bell.ring()
    assert not await bell.wait(0.0)
    assert not await bell.wait(0.01)
    waiters = [asyncio.create_task(bell.wait(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    bell.ring()
    assert await asyncio.gather(*waiters) == [True, True, True]
