"""Evaluation beside a run: what is due, weights that stay while they are read, results that are
reported once.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_actor.evaluation.checkpoints import (
    CheckpointRemoved,
    DueCheckpoint,
    choose,
    is_over,
    pinned,
)
from pipelinerl_actor.evaluation.evaluate import Estimate, Evaluation, make_sets, task_of
from pipelinerl_actor.evaluation.loop import EvaluationLoop
from pipelinerl_actor.evaluation.report import (
    EvaluationReport,
    EvaluationResult,
    evaluated_steps,
    result_file,
    results_folder,
    write_result,
)
from pipelinerl_actor.models import tiny
from pipelinerl_actor.tasks.arithmetic import Arithmetic
from pipelinerl_common import stream
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import Wiring, parse_wiring, run_until_first
from pipelinerl_common.settings import EvaluationSettings, Job, load_job, parse_job

ARITHMETIC = "pipelinerl_actor.tasks.arithmetic:Arithmetic"
SETS: list[dict[str, Any]] = [
    {
        "name": "held-out",
        "path": ARITHMETIC,
        "numPrompts": 6,
        "samplesPerPrompt": 2,
        "passAt": [2, 1],
    },
    {
        "name": "greedy",
        "path": ARITHMETIC,
        "numPrompts": 3,
        "sampling": {"temperature": 0.01, "maxTokens": 2},
    },
]
FOUND = Evaluation(
    40, 6, 2, {1: Estimate(0.25, 0.1, 0.4)}, Estimate(0.25, 0.1, 0.4), 2.5, 0.0, {"timeout": 1}
)


def document(
    model: Path | str = "tiny://arithmetic", steps: int = 4, **evaluation: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {
            "model": {"uri": str(model), "dtype": "float32", "maxModelLen": 64},
            "task": {"path": ARITHMETIC, "sampling": {"maxTokens": 4}},
            "algorithm": {"steps": steps},
            "actors": {"generator": {"engine": "vllm", "maxRunningRequests": 8}},
            "trainers": {"checkpoint": {"everySteps": 2}},
            "weightTransfer": {"backend": "gloo"},
            "evaluation": {
                "everySteps": 2,
                "sets": SETS,
                "generator": {"engine": "transformers"},
                **evaluation,
            },
        },
    }


def settings(**changes: Any) -> EvaluationSettings:
    return EvaluationSettings.model_validate({"everySteps": 20, "sets": SETS, **changes})


# What is due


@pytest.mark.parametrize(
    ("there", "evaluated", "choice"),
    [
        ([], [], DueCheckpoint(0)),
        ([10, 20, 30, 40], [], DueCheckpoint(0)),
        ([10, 20, 30, 40], [0], DueCheckpoint(40, (20,))),
        ([10], [0], None),
        ([50], [0, 40], None),
        ([50, 60], [0, 40], DueCheckpoint(60)),
        ([95, 100], [0, 20], DueCheckpoint(100, (40, 60, 80))),
        ([70, 75], [0, 60], DueCheckpoint(75)),  # the run's last step
        ([20], [0, 40], None),  # older than what is known is never gone back to
    ],
)
def test_the_newest_due_step_is_chosen_and_what_it_overtook_is_told(
    there: list[int], evaluated: list[int], choice: DueCheckpoint | None
) -> None:
    last_step = 75 if 75 in there else 100
    assert choose(settings(), last_step, there[::-1], evaluated) == choice


def test_without_a_start_the_first_checkpoint_is_the_first_evaluation() -> None:
    assert choose(settings(atStart=False), 100, [], []) is None
    assert choose(settings(atStart=False), 100, [20, 10], []) == DueCheckpoint(20)


def test_nothing_is_due_after_the_last_step() -> None:
    assert not is_over(60, [])
    assert not is_over(60, [0, 40])
    assert is_over(60, [0, 40, 60])
    assert not is_over(80, [0, 40, 60]), "a run that continues with more steps is evaluated further"


# Pins


def checkpoint(root: Path, step: int, model: Path | None = None) -> Path:
    """A complete one; its weights say which it is unless `model` is copied into it."""
    folder = root / "checkpoints" / f"step-{step}"
    if model is not None:
        shutil.copytree(model, folder / "model")
    else:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / "model.safetensors").write_text(f"weights of {step}")
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "rank-0.safetensors").write_text("moments")
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    (folder / "manifest.json").write_text(
        json.dumps({"schema_version": 1, "step": step, "files": files, "facts": {}})
    )
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pinned_weights_stay_while_their_checkpoint_is_removed_and_go_with_the_block(
    tmp_path: Path,
) -> None:
    folder = checkpoint(tmp_path, 40)
    with pinned(tmp_path, 40, tmp_path / "evaluations") as model:
        assert names(model) == {"config.json", "model.safetensors"}
        assert (model / "model.safetensors").samefile(folder / "model" / "model.safetensors"), (
            "it takes no room"
        )
        shutil.rmtree(folder)
        checkpoint(tmp_path, 40)  # written again, as after a trainer went back
        assert (model / "model.safetensors").read_text() == "weights of 40"
    assert names(tmp_path / "evaluations") == set()


def test_a_checkpoint_that_is_gone_or_torn_is_not_pinned(tmp_path: Path) -> None:
    pins = tmp_path / "evaluations"
    with (
        pytest.raises(CheckpointRemoved, match="step-40 is not there as a whole"),
        pinned(tmp_path, 40, pins),
    ):
        pass
    folder = checkpoint(tmp_path, 40)
    (folder / "optimizer" / "rank-0.safetensors").write_text("torn")
    with pytest.raises(CheckpointRemoved, match="not there as a whole"), pinned(tmp_path, 40, pins):
        pass


def test_a_checkpoint_that_is_removed_while_it_is_pinned_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path, 40)
    link = os.link

    def remove_then_link(source: Path, target: Path) -> None:
        link(source, target)
        shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(os, "link", remove_then_link)
    with (
        pytest.raises(CheckpointRemoved, match="was removed while it was pinned"),
        pinned(tmp_path, 40, tmp_path / "evaluations"),
    ):
        pass
    assert names(tmp_path / "evaluations") == set()


def test_where_there_are_no_hard_links_weights_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = checkpoint(tmp_path, 40)
    with pinned(tmp_path, 40, tmp_path / "evaluations") as model:
        shutil.rmtree(folder)
        assert (model / "model.safetensors").read_text() == "weights of 40"


def test_what_a_dead_evaluator_left_pinned_is_removed_by_its_successor(tmp_path: Path) -> None:
    pins = tmp_path / "evaluations"
    checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 40)
    crashed = pinned(tmp_path, 20, pins)
    crashed.__enter__()
    assert names(pins) == {".step-20.pin"}
    with pinned(tmp_path, 40, pins):
        assert names(pins) == {".step-40.pin"}


# Results


def test_a_result_is_written_whole_and_found_again(tmp_path: Path) -> None:
    write_result(tmp_path, EvaluationResult(40, {"held-out": FOUND}, {"hard": "no"}, 12.5, (20,)))
    write_result(tmp_path, EvaluationResult(0, {"held-out": FOUND}))
    (results_folder(tmp_path) / ".step-60.json.tmp").write_text("half")
    assert evaluated_steps(tmp_path) == [0, 40]
    written = json.loads(result_file(tmp_path, 40).read_text())
    assert written["sets"]["held-out"]["pass_at"]["1"] == {"mean": 0.25, "low": 0.1, "high": 0.4}
    assert (written["failed"], written["overtaken"], written["seconds"]) == (
        {"hard": "no"},
        [20],
        12.5,
    )
    assert str(EvaluationResult(40, {"held-out": FOUND}, {"hard": "no"})) == (
        "step 40: held-out pass@1 0.250 (0.100 to 0.400), reward 0.250; hard failed: no"
    )


def test_a_set_takes_from_training_what_it_does_not_say() -> None:
    spec = parse_job(document(), "job.yaml").spec
    assert spec.evaluation is not None
    first, second = (task_of(spec, each) for each in spec.evaluation.sets)
    assert (first.group_size, first.sampling) == (2, spec.task.sampling)
    assert (second.group_size, second.sampling.temperature, second.sampling.max_tokens) == (
        1,
        0.01,
        2,
    )


def test_every_set_has_a_task_of_other_prompts_than_training() -> None:
    job = parse_job(document(), "job.yaml")
    made = make_sets(job)
    assert list(made) == ["held-out", "greedy"]
    asked = [task.prompt(0) for task in made.values()]
    assert asked == [Arithmetic(seed=job.spec.seed + 1).prompt(0)] * 2
    assert asked[0] != Arithmetic(seed=job.spec.seed).prompt(0)


def test_a_set_that_cannot_be_made_is_named() -> None:
    job = parse_job(
        document(sets=[{"name": "wrong", "path": ARITHMETIC, "args": {"digit": 1}}]), "job.yaml"
    )
    with pytest.raises(
        SettingsError, match=r"evaluation set 'wrong': .* has no argument 'digit'; it has digits"
    ):
        make_sets(job)


async def test_a_result_is_told_once_whatever_else_is_dropped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse_job(document(), "job.yaml")
    assert job.spec.evaluation is not None
    async with (
        stream.NatsServer.start(tmp_path / "nats") as server,
        stream.connect(server.url, job.name, job.spec.stream, name="evaluator-0") as connection,
        connection.metrics() as records,
    ):
        send = connection.publish_metrics

        async def send_while_another_is_dropped(record: MetricsRecord) -> bool:
            sent = await send(record)
            connection.counters["metrics_dropped"] += 1
            return sent

        monkeypatch.setattr(connection, "publish_metrics", send_while_another_is_dropped)
        report = EvaluationReport(job, job.spec.evaluation, "evaluator-0", connection)
        for step in (40, 60):
            await report.done(EvaluationResult(step))
        async with asyncio.timeout(30):
            assert [(await anext(records)).step for _ in range(2)] == [40, 60]


# Whole evaluations, with real generators and a real stream


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Weights that differ by seed."""
    folder = tmp_path_factory.mktemp("tiny")
    return [
        tiny.make_tiny_model(folder / str(seed), seed=seed, hidden_size=32, num_layers=1)
        for seed in range(2)
    ]


@contextmanager
def free_address() -> Iterator[str]:
    import socket

    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def make_run(root: Path, model: Path, **evaluation: Any) -> Job:
    """The folder of a run with its job and its initial model."""
    root.mkdir()
    (root / "model").symlink_to(model)
    (root / "job.yaml").write_text(yaml.safe_dump(document(model, **evaluation)))
    return load_job(root / "job.yaml")


async def evaluate(
    root: Path, job: Job, server: stream.NatsServer, beside: Callable[[], Any] = lambda: None
) -> tuple[EvaluationResult | None, list[Any]]:
    """Runs the loop to the last step with `beside` called all the while; its last result, and the
    records of results.
    """
    assert job.spec.evaluation is not None
    with free_address() as address:
        flags = ["--job", str(root / "job.yaml"), "--output", str(root), "--listen", address]
        wiring: Wiring = parse_wiring("evaluator", [*flags, "--nats-url", server.url])
        async with stream.connect(
            server.url, job.name, job.spec.stream, name="evaluator-0"
        ) as connection:
            report = EvaluationReport(job, job.spec.evaluation, "evaluator-0", connection)

            async def watch() -> None:
                while True:
                    beside()
                    await asyncio.sleep(0.02)

            loop = EvaluationLoop(job.spec, job.spec.evaluation, wiring, report, make_sets(job))
            result = await run_until_first(loop.run(), report.run(), watch())
            async with connection.metrics() as records:
                of_steps = []
                async for record in records:
                    if record.step >= 0:
                        of_steps.append(record)
                    if record.step >= job.spec.algorithm.steps:
                        break
    return result, of_steps


@pytest.mark.e2e
async def test_each_step_is_evaluated_at_its_own_version_though_the_trainer_prunes(
    tmp_path: Path, models: Sequence[Path]
) -> None:
    root = tmp_path / "run"
    job = make_run(root, models[0])
    for step in (2, 4):
        checkpoint(root, step, models[1])

    def prune() -> None:
        if (results_folder(root) / ".step-4.pin" / "model.safetensors").exists():
            shutil.rmtree(root / "checkpoints", ignore_errors=True)

    async with stream.NatsServer.start(tmp_path / "nats") as server:
        result, records = await evaluate(root, job, server, prune)
    assert not (root / "checkpoints").exists()
    assert result is not None
    assert (result.step, result.failed, result.overtaken) == (4, {}, (2,))
    assert evaluated_steps(root) == [0, 4]
    assert names(results_folder(root)) == {"step-0.json", "step-4.json"}
    found = {step: json.loads(result_file(root, step).read_text()) for step in (0, 4)}
    for step, each in found.items():
        assert each["failed"] == {}
        assert {name: of["policy_version"] for name, of in each["sets"].items()} == {
            "held-out": step,
            "greedy": step,
        }
        assert (
            each["sets"]["held-out"]["num_prompts"],
            each["sets"]["held-out"]["num_samples"],
        ) == (6, 2)
        assert set(each["sets"]["held-out"]["pass_at"]) == {"1", "2"}
    assert [record.step for record in records] == [0, 4]
    values = records[-1].values
    assert (
        values["evaluation_pass_ratio{set=held-out,k=2}"]
        == found[4]["sets"]["held-out"]["pass_at"]["2"]["mean"]
    )
    assert values["evaluations_skipped_total{reason=overtaken}"] == 1
    assert values["evaluations_total{outcome=done}"] == 2
    assert values["evaluation_prompts_done{set=held-out}"] == 6


@pytest.mark.e2e
async def test_what_has_a_result_is_not_evaluated_again(
    tmp_path: Path, models: Sequence[Path]
) -> None:
    root = tmp_path / "run"
    job = make_run(root, models[0])
    for step in (0, 2):
        write_result(root, EvaluationResult(step, {"held-out": FOUND}))
    before = result_file(root, 2).read_bytes()
    checkpoint(root, 2, models[1])
    checkpoint(root, 4, models[1])
    async with stream.NatsServer.start(tmp_path / "nats") as server:
        _, records = await evaluate(root, job, server)
        assert [record.step for record in records] == [4]
        assert result_file(root, 2).read_bytes() == before
        assert (await evaluate_nothing(root, job, server)) is None


async def evaluate_nothing(
    root: Path, job: Job, server: stream.NatsServer
) -> EvaluationResult | None:
    """The loop of a run whose last step has a result: it ends at once."""
    assert job.spec.evaluation is not None
    wiring = parse_wiring("evaluator", ["--job", str(root / "job.yaml"), "--output", str(root)])
    async with stream.connect(
        server.url, job.name, job.spec.stream, name="evaluator-0"
    ) as connection:
        report = EvaluationReport(job, job.spec.evaluation, "evaluator-0", connection)
        return await EvaluationLoop(
            job.spec, job.spec.evaluation, wiring, report, make_sets(job)
        ).run()


@pytest.mark.e2e
async def test_an_evaluation_that_fails_is_a_result_too(
    tmp_path: Path, models: Sequence[Path]
) -> None:
    """The generator cannot load these weights; the next evaluation has its own chance."""
    root = tmp_path / "run"
    job = make_run(root, models[0], atStart=False)
    broken = tmp_path / "broken"
    shutil.copytree(models[0], broken)
    (broken / "config.json").write_text("{}")
    checkpoint(root, 4, broken)
    async with stream.NatsServer.start(tmp_path / "nats") as server:
        result, records = await evaluate(root, job, server)
    assert result is not None
    assert result.sets == {}
    assert set(result.failed) == {"held-out", "greedy"}
    assert "ended before it served anything" in result.failed["held-out"]
    assert evaluated_steps(root) == [4]
    assert records[-1].values["evaluations_total{outcome=failed}"] == 1
    assert records[-1].values["evaluation_sets_failed"] == 2
    assert not any(name.startswith("evaluation_pass_ratio") for name in records[-1].values)


@pytest.mark.e2e
async def test_an_evaluation_that_takes_too_long_keeps_what_it_has(
    tmp_path: Path, models: Sequence[Path]
) -> None:
    root = tmp_path / "run"
    job = make_run(root, models[0], atStart=False, timeoutSeconds=0.5)
    checkpoint(root, 4, models[1])
    async with stream.NatsServer.start(tmp_path / "nats") as server:
        result, _ = await evaluate(root, job, server)
    assert result is not None
    assert result.failed["held-out"] == "not done within evaluation.timeoutSeconds=0.5"
