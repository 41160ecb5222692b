"""Whole runs of one rank in this process: real gRPC, a real nats-server, a real receiver group."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_fakes as fakes
from safetensors.torch import load_file
from trainer_fake_services import DEADLINE_S, Coordinator, Peers, Preprocessor, serving, until
from transformers import AutoModelForCausalLM

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common import stream
from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.service import Wiring
from pipelinerl_common.settings import Job
from pipelinerl_common.stream import NatsServer
from pipelinerl_trainer import start
from pipelinerl_trainer.ranks import RankPlacement
from pipelinerl_trainer.start import TrainerArgs

LAST_METRICS = "last-metrics"


def run_of(
    job: Job, output: Path, peers: Peers, nats_url: str, *, listen: str, resume: bool = False
) -> TrainerArgs:
    wiring = Wiring(
        job_file=Path("job.yaml"),
        name="trainer-0",
        output=output,
        listen=listen,
        nats_url=nats_url,
        preprocessor=peers.preprocessor_address,
        coordinator=peers.coordinator_address,
        generators=(),
        references=(),
        token_file=None,
        log_level="info",
    )
    return TrainerArgs(job, wiring, RankPlacement(), resume, last_metrics=output / LAST_METRICS)


@dataclass
class Running:
    """A trainer that runs in this event loop."""

    peers: Peers
    output: Path
    task: asyncio.Task[None]
    stop: asyncio.Event

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer.start(tmp_path / "nats") as server:
        yield server


@asynccontextmanager
async def running(
    output: Path,
    nats: NatsServer,
    peers: Peers,
    *,
    form: bool = True,
    resume: bool = False,
    **spec: Any,
) -> AsyncIterator[Running]:
    """A trainer on a tiny model with its group formed; ended by force when the block is left."""
    if not (output / "model").exists():
        fakes.save_tiny_model(output / "model")
    listen = f"127.0.0.1:{free_port()}"
    peers.coordinator.trainer = listen
    stop = asyncio.Event()
    run = run_of(fakes.job(**spec), output, peers, nats.url, listen=listen, resume=resume)
    task = asyncio.create_task(start.run_rank(run, stop), name="trainer")
    try:
        if form:
            forming = asyncio.create_task(peers.coordinator.form())
            await asyncio.wait({task, forming}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                forming.cancel()
                await task
            await forming
        yield Running(peers, output, task, stop)
    finally:
        stop.set()
        if not task.done():
            await asyncio.wait({task}, timeout=DEADLINE_S)


async def records_of(nats: NatsServer, count: int) -> list[metrics_pb2.MetricsRecord]:
    found: list[metrics_pb2.MetricsRecord] = []
    settings = fakes.job().spec.stream
    async with (
        asyncio.timeout(DEADLINE_S),
        stream.connect(nats.url, "toy", settings, name="test") as connection,
        connection.metrics() as records,
    ):
        async for record in records:
            found.append(record)
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


async def test_a_run_trains_publishes_commits_and_exports(tmp_path: Path, nats: NatsServer) -> None:
    async with serving(Preprocessor(num_steps=4), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        preprocessor, coordinator = peers.preprocessor, peers.coordinator
        assert preprocessor.trained == [0, 1, 2, 3]
        assert preprocessor.last_seen
        assert preprocessor.restores == [(0, False)]
        assert coordinator.versions[0] == 0
        assert preprocessor.published == coordinator.versions[: len(preprocessor.published)]
        assert not any(coordinator.rollbacks)
    first, *_, last = await records_of(nats, 4)
    assert (first.step, last.step, last.role, last.instance) == (1, 4, "trainer", "trainer-0")
    assert last.values["policy_version"] == 4
    left = dict(line.split() for line in (tmp_path / LAST_METRICS).read_text().splitlines())
    assert set(left) == {
        f"pipelinerl_{name}" for name in ("policy_version", "reward_mean", "lag_mean", "ess")
    }
    assert {name: float(value) for name, value in left.items()} == {
        name: last.values[name.removeprefix("pipelinerl_")] for name in left
    }
    assert last.values["num_sequences"] == 4
    assert last.values["success_mean"] == 0.5
    assert last.values["optimizer_steps_total"] == 4
    assert last.values["samples_trained_total"] == 16
    assert (
        last.values["tokens_trained_total"]
        == last.values["lag_steps_count"]
        > first.values["lag_steps_count"]
        > 0
    )
    assert last.values["trainer_phase_seconds_total{phase=train}"] > 0
    for name in (
        "reward_mean",
        "ess",
        "ess_truncated",
        "lag_mean",
        "grad_norm",
        "wait_seconds",
        "lag_steps_bucket{le=0}",
    ):
        assert name in last.values, name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    initial = fakes.tiny_model()
    moved = [
        float((a - b).abs().max())
        for a, b in zip(exported.state_dict().values(), initial.state_dict().values(), strict=True)
    ]
    assert 0 < max(moved) < 0.01  # 4 steps of AdamW at 1e-3


async def test_batches_that_come_row_by_row_train_the_same_even_when_one_is_replaced_half_way(
    tmp_path: Path, nats: NatsServer
) -> None:
    exported = []
    for preprocessor in (Preprocessor(), Preprocessor(streams=True, replaced_steps={1})):
        output = tmp_path / str(preprocessor.streams)
        async with (
            serving(preprocessor, Coordinator()) as peers,
            running(output, nats, peers) as trainer,
        ):
            await trainer.end()
        assert preprocessor.trained == [0, 1, 2, 3]
        exported.append(load_file(output / "final" / "model.safetensors"))
    assert preprocessor.pulls[2:6] == [
        (1, "", 0),
        (1, "to be replaced", 1),
        (1, "", 0),
        (1, "batch-1", 1),
    ]
    whole, streamed = exported
    for name, weight in whole.items():
        torch.testing.assert_close(streamed[name], weight, atol=1e-6, rtol=1e-5)


async def test_a_publish_that_the_policy_holds_back_goes_out_later(
    tmp_path: Path, nats: NatsServer
) -> None:
    preprocessor = Preprocessor(num_steps=3)
    preprocessor.may_publish = lambda version: version != 2 or preprocessor.num_publishes_held > 3
    preprocessor.hold_at = 2
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers) as trainer,
    ):
        await until(lambda: 2 in preprocessor.published, "the publication that was held back")
        assert preprocessor.num_publishes_held == 4
        preprocessor.hold_at = None
        await trainer.end()


async def test_a_stopped_run_leaves_a_checkpoint_and_the_same_run_goes_on_from_it(
    tmp_path: Path, nats: NatsServer
) -> None:
    """No step is trained twice, and the two halves make the same model as one whole run."""
    async with serving(Preprocessor(num_steps=9), Coordinator()) as peers:
        peers.preprocessor.hold_at = 2
        async with running(tmp_path / "halves", nats, peers, algorithm={"steps": 4}) as trainer:
            await until(lambda: peers.preprocessor.num_held > 0, "waiting for step 2")
            trainer.stop.set()
            await trainer.end()
        assert [path.name for path in (tmp_path / "halves" / "checkpoints").iterdir()] == ["step-2"]
        assert not (tmp_path / "halves" / "final").exists()
        peers.preprocessor.hold_at = None
        peers.coordinator.versions.clear()
        async with running(
            tmp_path / "halves", nats, peers, resume=True, algorithm={"steps": 4}
        ) as trainer:
            await trainer.end()
        assert peers.preprocessor.trained == [0, 1, 2, 3]
        assert peers.preprocessor.restores == [(0, False), (2, True)]
        assert peers.coordinator.versions[0] == 2
        assert peers.coordinator.rollbacks[-len(peers.coordinator.versions)]
    async with (
        serving(Preprocessor(num_steps=9), Coordinator()) as peers,
        running(tmp_path / "whole", nats, peers, algorithm={"steps": 4}) as trainer,
    ):
        await trainer.end()
    halves, whole = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("halves", "whole")
    )
    assert all(torch.equal(halves[name], whole[name]) for name in whole)


async def test_weights_of_a_step_that_is_not_committed_are_never_in_a_checkpoint(
    tmp_path: Path, nats: NatsServer
) -> None:
    """Their step would be trained again on top of them."""
    preprocessor = Preprocessor(num_steps=9, lost_commits=1)
    async with serving(preprocessor, Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await until(lambda: preprocessor.num_turned_away > 0, "the commit of the second step")
            trainer.stop.set()
            await trainer.end()
        assert preprocessor.trained == [0]
        assert not (tmp_path / "checkpoints").exists()
        preprocessor.lost_commits = None
        async with running(tmp_path, nats, peers, resume=True) as trainer:
            await trainer.end()
    assert preprocessor.restores == [(0, False), (0, False)]
    assert preprocessor.trained == [0, 0, 1, 2, 3]


async def test_resuming_without_a_checkpoint_starts_over_with_a_fresh_ledger(
    tmp_path: Path, nats: NatsServer
) -> None:
    async with serving(Preprocessor(num_steps=4, committed=3), Coordinator()) as peers:
        async with running(tmp_path, nats, peers, resume=True) as trainer:
            await trainer.end()
        assert peers.preprocessor.restores == [(0, False)]
        assert peers.preprocessor.trained == [0, 1, 2, 3]


async def test_a_finished_run_that_is_resumed_trains_nothing_and_exports_again(
    tmp_path: Path, nats: NatsServer
) -> None:
    async with serving(Preprocessor(num_steps=4), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        (tmp_path / "final" / "model.safetensors").unlink()
        async with running(tmp_path, nats, peers, resume=True, form=False) as trainer:
            await trainer.end()
        assert peers.preprocessor.trained == [0, 1, 2, 3]
        assert peers.preprocessor.restores == [(0, False)]
    assert (tmp_path / "final" / "model.safetensors").exists()


async def test_a_new_run_never_mixes_with_the_checkpoints_of_an_older_one(
    tmp_path: Path, nats: NatsServer
) -> None:
    async with serving(Preprocessor(num_steps=4), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        with pytest.raises(
            SettingsError, match="already holds a checkpoint of step 4: pass --resume"
        ):
            async with running(tmp_path, nats, peers, form=False) as trainer:
                await trainer.end()


async def test_checkpoints_are_written_when_due_and_a_torn_one_is_passed_over(
    tmp_path: Path, nats: NatsServer
) -> None:
    trainers = {"checkpoint": {"everySteps": 1, "keep": 5}}
    async with serving(Preprocessor(num_steps=4), Coordinator()) as peers:
        async with running(tmp_path, nats, peers, trainers=trainers) as trainer:
            await trainer.end()
        checkpoints = tmp_path / "checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == [
            "step-1",
            "step-2",
            "step-3",
            "step-4",
        ]
        (checkpoints / "step-4" / "manifest.json").unlink()
        (checkpoints / "step-3" / "optimizer" / "rank-0.safetensors").write_bytes(b"torn")
        async with running(tmp_path, nats, peers, trainers=trainers, resume=True) as trainer:
            await trainer.end()
        assert peers.preprocessor.restores == [(0, False), (2, True)]
        assert peers.preprocessor.trained == [0, 1, 2, 3, 2, 3]
    assert (checkpoints / "step-4" / "manifest.json").exists()


async def test_a_preprocessor_that_is_away_is_waited_for(tmp_path: Path, nats: NatsServer) -> None:
    preprocessor = Preprocessor(num_steps=4, is_away=True)
    async with serving(preprocessor, Coordinator()) as peers:
        async with running(tmp_path, nats, peers, form=False) as trainer:
            await until(lambda: preprocessor.num_turned_away >= 2, "two attempts")
            preprocessor.is_away = False
            forming = asyncio.create_task(peers.coordinator.form())
            await until(lambda: preprocessor.committed >= 1, "the first step")
            preprocessor.is_away = True
            turned_away = preprocessor.num_turned_away
            await until(
                lambda: preprocessor.num_turned_away >= turned_away + 2 or trainer.task.done(),
                "two more attempts",
            )
            preprocessor.is_away = False
            await trainer.end()
            await forming
        assert preprocessor.trained == [0, 1, 2, 3]


async def test_training_goes_on_while_the_coordinator_is_away_and_publication_catches_up(
    tmp_path: Path, nats: NatsServer
) -> None:
    preprocessor = Preprocessor(num_steps=9, needs_publication=False, hold_at=4)
    async with serving(preprocessor, Coordinator(is_away=True)) as peers:
        async with running(tmp_path, nats, peers, algorithm={"steps": 9}) as trainer:
            await until(lambda: preprocessor.num_held > 0, "training four steps")
            assert peers.coordinator.versions == []
            peers.coordinator.is_away = False
            await until(lambda: preprocessor.published == [4], "the newest version alone")
            preprocessor.hold_at = None
            await trainer.end()
        assert peers.coordinator.versions[0] == 4


async def test_a_newcomer_is_brought_up_while_the_trainer_waits(
    tmp_path: Path, nats: NatsServer
) -> None:
    preprocessor = Preprocessor(num_steps=9, hold_at=1)
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers) as trainer,
    ):
        await until(
            lambda: preprocessor.num_held > 0 and preprocessor.published[-1:] == [1],
            "waiting for step 1",
        )
        peers.coordinator.weights.clear()
        await peers.coordinator.form()
        await until(lambda: bool(peers.coordinator.weights), "the same weights in the new group")
        assert peers.coordinator.versions[-1] == 1
        trainer.stop.set()
        await trainer.end()


async def test_nothing_is_published_where_the_plan_says_so(
    tmp_path: Path, nats: NatsServer
) -> None:
    preprocessor = Preprocessor(num_steps=9, publish_after=lambda step: step == 1, hold_at=3)
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers) as trainer,
    ):
        await until(
            lambda: preprocessor.num_held > 0 and peers.coordinator.versions[-1:] == [2],
            "version 2",
        )
        trainer.stop.set()
        await trainer.end()
        assert peers.coordinator.versions == [0, 2]


async def test_a_step_that_is_not_finite_is_skipped_and_the_run_goes_on(
    tmp_path: Path, nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Preprocessor(num_steps=4, poisoned_step=1), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        assert peers.preprocessor.trained == [0, 1, 2, 3]
    records = await records_of(nats, 4)
    assert [record.values["skipped_steps_total"] for record in records] == [0, 1, 1, 1]
    assert [record.values["non_finite_micro_batches"] for record in records] == [0, 2, 0, 0]
    assert all(value == value for record in records for value in record.values.values())
    assert "alert=non_finite_step step=1" in caplog.text


async def test_the_end_of_the_run_ends_training_early(tmp_path: Path, nats: NatsServer) -> None:
    async with serving(Preprocessor(num_steps=2), Coordinator()) as peers:
        async with running(tmp_path, nats, peers) as trainer:
            await trainer.end()
        assert peers.preprocessor.trained == [0, 1]
    assert (tmp_path / "final" / "config.json").exists()
    assert (tmp_path / "checkpoints" / "step-2").exists()


async def test_a_ledger_that_is_elsewhere_for_good_ends_the_process_with_the_reason(
    tmp_path: Path, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl_trainer.source.REFUSED_FOR_S", 0.3)
    preprocessor = Preprocessor(num_steps=9, hold_at=1)
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers) as trainer,
    ):
        await until(lambda: preprocessor.num_held > 0, "waiting for step 1")
        preprocessor.committed, preprocessor.hold_at = 0, None
        with pytest.raises(
            FatalError,
            match=r"refuses for step 1: .* is not the next.* restart the trainer with --resume",
        ):
            await trainer.end()


async def test_a_stop_is_heard_while_waiting_for_the_preprocessor(
    tmp_path: Path, nats: NatsServer
) -> None:
    preprocessor = Preprocessor(is_away=True)
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers, form=False) as trainer,
    ):
        await until(lambda: preprocessor.num_turned_away > 0, "an attempt")
        trainer.stop.set()
        await trainer.end()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tied", [True, False])
async def test_generators_get_the_whole_model_by_its_checkpoint_names(
    tmp_path: Path, nats: NatsServer, stage: int, tied: bool
) -> None:
    fakes.save_tiny_model(tmp_path / "model", tied=tied)
    preprocessor = Preprocessor(num_steps=9, hold_at=2)
    async with (
        serving(preprocessor, Coordinator()) as peers,
        running(tmp_path, nats, peers, trainers={"zeroStage": stage}) as trainer,
    ):
        await until(
            lambda: preprocessor.num_held > 0 and preprocessor.published[-1:] == [2], "version 2"
        )
        trainer.stop.set()
        await trainer.end()
    sent, saved = (
        peers.coordinator.weights,
        load_file(tmp_path / "checkpoints" / "step-2" / "model" / "model.safetensors"),
    )
    assert set(sent) == set(load_file(tmp_path / "model" / "model.safetensors"))
    assert ("lm_head.weight" in sent) is not tied
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


async def test_a_run_with_adapters_sends_only_them_and_goes_on_from_its_checkpoint(
    tmp_path: Path, nats: NatsServer
) -> None:
    spec: dict[str, Any] = {
        "model": {"adapter": {"rank": 4, "targetModules": ["q_proj"]}},
        "algorithm": {"steps": 4},
    }
    base = fakes.save_tiny_model(tmp_path / "model") / "model.safetensors"
    before = base.read_bytes()
    preprocessor = Preprocessor(num_steps=9, hold_at=2)
    async with serving(preprocessor, Coordinator()) as peers:
        async with running(tmp_path, nats, peers, **spec) as trainer:
            await until(
                lambda: preprocessor.num_held > 0 and preprocessor.published[-1:] == [2],
                "version 2",
            )
            trainer.stop.set()
            await trainer.end()
        second = peers.coordinator.weights
        preprocessor.hold_at = None
        async with running(tmp_path, nats, peers, resume=True, **spec) as trainer:
            await trainer.end()
        sent, manifest = peers.coordinator.weights, peers.coordinator.manifest
    assert preprocessor.trained == [0, 1, 2, 3]
    saved = load_file(tmp_path / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in second} == set(saved)
    assert all(
        torch.equal(saved[f"base_model.model.{name}"], tensor) for name, tensor in second.items()
    )
    assert set(sent) == {
        f"model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
        for layer in (0, 1)
        for half in "AB"
    }
    assert manifest is not None
    assert (
        manifest.num_bytes
        == sum(tensor.nbytes for tensor in sent.values())
        == 2 * 4 * (4 * 16 + 32 * 4)
    )
    assert (await records_of(nats, 4))[-1].values["update_bytes"] == manifest.num_bytes
    assert base.read_bytes() == before
    final, frozen = load_file(tmp_path / "final" / "model.safetensors"), load_file(base)
    changed = {name for name, weight in final.items() if not torch.equal(weight, frozen[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert (tmp_path / "final" / "adapter" / "adapter_config.json").is_file()
