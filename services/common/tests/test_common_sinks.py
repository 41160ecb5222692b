"""Rows reach real TensorBoard files and a real offline W&B run, and a bad sink holds nothing up."""

import asyncio
import json
import logging
import struct
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import TRAINER, Metrics
from pipelinerl_common.service import parse_wiring
from pipelinerl_common.settings import SinkSettings, TensorBoardSettings, WandbSettings, load_job
from pipelinerl_common.sinks.process import SinkProcess
from pipelinerl_common.sinks.sink import (
    MOST_FAILURES,
    RowBuilder,
    Sink,
    SinkThread,
    StepRow,
    TensorBoardSink,
    WandbSink,
)
from pipelinerl_common.stream import NatsServer, connect

JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: sums}
spec:
  model: {uri: "tiny://arithmetic"}
  task: {path: "tasks:Sums"}
  telemetry: {sinks: {tensorboard: {}, wandb: {project: tests, mode: offline}}}
"""
BLOCK = 32768


def record(
    role: str, instance: str, step: int, values: Mapping[str, float], time: float = 100.0
) -> MetricsRecord:
    return MetricsRecord(
        schema_version=1,
        job="sums",
        role=role,
        instance=instance,
        time=time,
        step=step,
        values=values,
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, read back by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """Rows of the offline runs below `folder`. The file is a log of LevelDB's format: blocks of 32
    KiB, behind a header of 7 bytes, hold records as chunks of checksum, length, type (1 whole, 2
    first, 3 middle, 4 last) and data.
    """
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        log, position, data = file.read_bytes(), 7, b""
        while position + 7 <= len(log):
            if BLOCK - position % BLOCK < 7:
                position += BLOCK - position % BLOCK
                continue
            _, length, kind = struct.unpack("<IHB", log[position : position + 7])
            data += log[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                parsed = wandb_internal_pb2.Record.FromString(data)
                data = b""
                if parsed.HasField("history"):
                    items = {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in parsed.history.item
                    }
                    rows.append(items)
    return rows


def test_a_row_has_the_steps_own_values_and_the_newest_of_all_others() -> None:
    rows = RowBuilder(since=50.0)
    assert (
        rows.take(record("trainer", "trainer-0", 3, {"reward_mean": 0.1}, time=49.0)) is None
    )  # an earlier process's
    assert (
        rows.take(
            record(
                "actor",
                "actor-0",
                -1,
                {"requests_running": 3.0, "fill_ratio": 0.25, "seconds_bucket{le=1}": 9.0},
            )
        )
        is None
    )
    assert (
        rows.take(record("actor", "actor-1", -1, {"requests_running": 4.0, "fill_ratio": 0.75}))
        is None
    )
    assert (
        rows.take(
            record("actor", "actor-0", -1, {"requests_running": 5.0, "fill_ratio": float("nan")})
        )
        is None
    )
    assert (
        rows.take(record("preprocessor", "preprocessor-0", 3, {"queue_groups{stage=ready}": 6.0}))
        is None
    )
    row = rows.take(record("trainer", "trainer-0", 4, {"reward_mean": 0.5, "loss": float("nan")}))
    assert row == StepRow(
        4,
        100.0,
        {
            "trainer/reward_mean": 0.5,
            "actor/requests_running": 9.0,
            "actor/fill_ratio": 0.5,
            "preprocessor/queue_groups/ready": 6.0,
        },
    )


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(TensorBoardSettings(), tmp_path / "tensorboard")
    sink.open()
    for step in (1, 2, 3):
        sink.write(
            StepRow(
                step, 100.0 + step, {"trainer/reward_mean": step / 4, "actor/requests_running": 8.0}
            )
        )
    sink.close()
    assert scalars(tmp_path / "tensorboard") == {
        "trainer/reward_mean": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "actor/requests_running": [(1, 8.0), (2, 8.0), (3, 8.0)],
    }


def test_an_offline_wandb_run_holds_what_was_logged_and_keeps_its_id(tmp_path: Path) -> None:
    settings = WandbSettings(project="tests", mode="offline")
    for steps in ((1, 2), (2, 3)):  # a restarted trainer does step 2 again
        sink = WandbSink(settings, tmp_path, job="sums", config={"seed": 1})
        sink.open()
        for step in steps:
            sink.write(StepRow(step, 100.0 + step, {"trainer/reward_mean": step / 4}))
        sink.close()
        ended = int(time.time())
        while int(time.time()) == ended:  # wandb names the folder of a session by the second
            time.sleep(0.05)
    logged = [(row["step"], row["trainer/reward_mean"]) for row in wandb_history(tmp_path)]
    assert sorted(logged) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    files = [file.name for file in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert set(files) == {f"run-{(tmp_path / 'id').read_text()}.wandb"}


class Recorder:
    """A fake sink: takes rows until it is set to block or to fail."""

    name = "recorder"

    def __init__(self, gate: threading.Event | None = None, fails: bool = False) -> None:
        self.rows: list[int] = []
        self.closed = False
        self._gate, self._fails = gate, fails

    def open(self) -> None:
        """Nothing to open."""

    def write(self, row: StepRow) -> None:
        if self._gate is not None:
            self._gate.wait(60)
        if self._fails:
            raise ConnectionError("no route to host")
        self.rows.append(row.step)

    def close(self) -> None:
        self.closed = True


def test_a_slow_sink_never_makes_its_feeder_wait_and_what_it_loses_is_counted() -> None:
    gate = threading.Event()
    sink = Recorder(gate)
    thread = SinkThread(sink, rows=4)
    began = time.monotonic()
    for step in range(100):
        thread.put(StepRow(step, 0.0, {}))
    assert time.monotonic() - began < 5
    assert thread.dropped["full"] in (
        95,
        96,
    )  # 4 wait, one more if the thread had taken one out by then
    gate.set()
    assert thread.close(30)
    assert thread.written == len(sink.rows) == 100 - thread.dropped["full"]
    assert sink.closed


def test_closing_does_not_wait_for_the_pause_after_a_failure() -> None:
    thread = SinkThread(Recorder(fails=True), pause_s=600)
    thread.put(StepRow(1, 0.0, {}))
    assert thread.close(30)
    assert thread.dropped == {"failed": 1}


def test_a_sink_that_hangs_is_left_behind() -> None:
    gate = threading.Event()
    thread = SinkThread(Recorder(gate), rows=4)
    for step in range(3):
        thread.put(StepRow(step, 0.0, {}))
    assert not thread.close(0.2)
    gate.set()


def test_a_failing_sink_is_given_up_after_a_few_rows(caplog: pytest.LogCaptureFixture) -> None:
    thread = SinkThread(Recorder(fails=True), pause_s=0.001)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            thread.put(StepRow(step, 0.0, {}))
        assert thread.close(30)
    assert (thread.written, thread.dropped) == (0, {"failed": 20})
    assert len(caplog.messages) == MOST_FAILURES
    assert (
        caplog.messages[-1]
        == "sink=recorder step=5 lost: ConnectionError: no route to host; given up for this session"
    )


@pytest.mark.parametrize("library", ["wandb", "tensorboard"])
def test_a_sink_without_its_library_says_what_to_install(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (library, "tensorboard.summary.writer.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    sinks: dict[str, Sink] = {
        "wandb": WandbSink(WandbSettings(), tmp_path, job="sums", config={}),
        "tensorboard": TensorBoardSink(TensorBoardSettings(), tmp_path),
    }
    with pytest.raises(SettingsError, match=rf"pip install 'pipelinerl\[{library}\]'"):
        sinks[library].open()


async def test_the_sinks_process_writes_every_step_of_the_stream_to_both_sinks(
    tmp_path: Path, server: NatsServer
) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(JOB)
    job = load_job(job_file)
    wiring = parse_wiring(
        "trainer", [f"--job={job_file}", f"--output={tmp_path}", f"--nats-url={server.url}"]
    )
    async with connect(server.url, job.name, job.spec.stream, name="test") as stream:
        await stream.publish_metrics(
            record("trainer", "trainer-0", 1, {"reward_mean": 0.1}, time=time.time() - 100)
        )
        metrics = Metrics(TRAINER, job.name)
        process = SinkProcess(job.spec.telemetry.sinks, wiring, metrics)
        running = asyncio.ensure_future(process.run())
        step = 1
        async with asyncio.timeout(120):
            while not all(
                metrics.values().get(f"sink_rows_total{{sink={sink},outcome=written}}")
                for sink in ("wandb", "tensorboard")
            ):
                step += 1
                values = {"reward_mean": step / 100}
                await stream.publish_metrics(
                    record("trainer", "trainer-0", step, values, time=time.time())
                )
                await asyncio.sleep(0.2)
        await process.finish()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    seen = scalars(tmp_path / "tensorboard")["trainer/reward_mean"]
    logged = [
        (row["step"], row["trainer/reward_mean"]) for row in wandb_history(tmp_path / "wandb")
    ]
    assert [at for at, _ in seen] == [at for at, _ in logged] == list(range(seen[0][0], step + 1))
    assert seen[0][0] >= 2
    assert logged[-1] == (step, step / 100)


async def test_sinks_that_cannot_start_are_tried_a_few_times_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wiring = parse_wiring("trainer", [f"--job={tmp_path / 'missing.yaml'}", f"--output={tmp_path}"])
    process = SinkProcess(
        SinkSettings(tensorboard=TensorBoardSettings()), wiring, Metrics(TRAINER, "sums")
    )
    with caplog.at_level(logging.WARNING):
        running = asyncio.ensure_future(process.run())
        async with asyncio.timeout(120):
            while sum("ended with status 2" in message for message in caplog.messages) < 3:
                assert not running.done()
                await asyncio.sleep(0.1)
    assert not running.done()  # the trainer continues
    await process.finish()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    process = SinkProcess(
        SinkSettings(tensorboard=TensorBoardSettings()), wiring, Metrics(TRAINER, "sums")
    )
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await process.run()
    assert "sinks could not be started" in caplog.messages[-1]


async def test_what_a_library_prints_between_the_counts_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("""#!/bin/sh
echo 'wandb: a new version is there'
echo '["no", "counts"]'
echo '{"wandb": {"written": 2}}'
echo
echo '{"wandb": {"written": 5, "failed": 1}}'
cat > /dev/null
""")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    wiring = parse_wiring("trainer", [f"--job={tmp_path / 'job.yaml'}", f"--output={tmp_path}"])
    metrics = Metrics(TRAINER, "sums")
    process = SinkProcess(SinkSettings(tensorboard=TensorBoardSettings()), wiring, metrics)
    running = asyncio.ensure_future(process.run())
    async with asyncio.timeout(120):
        while metrics.values().get("sink_rows_total{sink=wandb,outcome=failed}") != 1:
            assert not running.done()
            await asyncio.sleep(0.01)
    assert metrics.values()["sink_rows_total{sink=wandb,outcome=written}"] == 5
    await process.finish()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_without_a_sink_no_process_is_started(tmp_path: Path) -> None:
    wiring = parse_wiring("trainer", [f"--job={tmp_path / 'missing.yaml'}", f"--output={tmp_path}"])
    metrics = Metrics(TRAINER, "sums")
    process = SinkProcess(SinkSettings(), wiring, metrics)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await process.run()
    await process.finish()
    assert metrics.values() == {}
