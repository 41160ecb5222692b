"""A disk that is full while a run continues: what could not be written is said once and counted,
and nothing ends with it.
"""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pipelinerl_cli.up.endings import in_background
from pipelinerl_cli.up.live_metrics import RunView, SessionRecords
from pipelinerl_cli.up.status_lines import LOOK_S, Silence
from pipelinerl_common.runs.records import MetricsWriter, Record, read_records
from pipelinerl_control.metrics import ActorScale


def step(number: int) -> Record:
    return Record("trainer", "trainer-0", float(number), number, {"reward_mean": 0.5})


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def full() -> Iterator[MetricsWriter]:
    with Path("/dev/full").open("wb", buffering=0) as device:
        yield MetricsWriter(Path("metrics.jsonl"), started_at=0.0, _file=device)


def test_record_that_a_full_disk_refused_is_still_news(full: MetricsWriter) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            full.write(step(1))


def test_record_that_did_not_fit_leaves_no_half_a_line_and_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter.open(path, now=0)
    writer.write(step(1))
    size = path.stat().st_size
    with files_of_at_most(size + 20):
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                writer.write(step(2))
        assert path.stat().st_size == size
    assert writer.write(step(2))
    writer.close()
    assert [record.step for record in read_records(path)] == [1, 2]


def test_thinned_record_that_a_full_disk_refused_is_not_thinned_out_when_it_comes_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter.open(path, now=0)
    reported = Record("actor", "actor-0", 7200.0, -1, {"tokens_generated_total": 1.0})
    with files_of_at_most(0), pytest.raises(OSError, match="File too large"):
        writer.write(reported)
    assert writer.write(reported)
    writer.close()
    assert [record.time for record in read_records(path)] == [7200.0]


async def test_silence_is_watched_and_shown_while_nothing_of_it_can_be_written(
    full: MetricsWriter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl_cli.up.status_lines.LOOK_S", LOOK_S / 100)
    view = RunView(steps_total=9)
    records = SessionRecords(full, view)
    said: list[str] = []
    ended = asyncio.Event()
    silences = iter([{"generator-0-0": 20.0}, {"generator-0-0": 50.0}, {"generator-0-0": 200.0}])
    records.begin()
    records.take_scale(ActorScale(desired=2, ready=1))
    async with AsyncExitStack() as stack:
        silence = Silence(said.append, records.take, lambda name: ended.set())
        in_background(stack, silence.watch(lambda: next(silences, {})))
        async with asyncio.timeout(30):
            await ended.wait()
    assert [line.partition(":")[0].partition(";")[0] for line in said] == [
        "generator-0-0 has not answered for 20 s",
        "generator-0-0 has not answered for 50 s",
        "generator-0-0 has not answered for 200 s",
    ]
    records.count_restart("generator-0-0")
    assert (view.actors, view.restarts) == ("1 of 2", 1)
    records.end()
    assert records.num_lost == 6
    assert [record.getMessage() for record in caplog.records] == [
        "the run continues without writing to metrics.jsonl: [Errno 28] No space left on device",
        "6 records of this session could not be written to metrics.jsonl",
    ]


async def test_a_part_that_crashes_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def crash() -> None:
        raise ValueError("a bug")

    async with AsyncExitStack() as stack:
        task = in_background(stack, crash())
        await asyncio.wait({task})
        await asyncio.sleep(0)
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert record.getMessage().endswith("crash crashed: ValueError: a bug")
