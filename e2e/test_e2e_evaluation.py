"""Whole runs with an evaluator: each step at its own version of the weights, with processes killed
and the run interrupted.
"""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from up_run import ROOT, Run

JOB = ROOT / "e2e" / "jobs" / "arithmetic-evaluation.yaml"
SMALL_ENGINE = ("--set", "evaluation.generator={engine: transformers}")

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(600)]


def results(run: Run) -> dict[int, dict[str, Any]]:
    """The evaluation records by step."""
    files = (run.output / "evaluations").glob("step-*.json")
    return {
        each["step"]: each
        for each in sorted(
            (json.loads(file.read_text()) for file in files), key=lambda each: each["step"]
        )
    }


def evaluated_records(run: Run) -> list[int]:
    return [
        record["step"]
        for record in run.records
        if record["role"] == "evaluator" and record["step"] >= 0
    ]


def test_checkpoints_are_evaluated_beside_training_though_the_evaluator_is_killed(
    new_run: Callable[..., Run],
) -> None:
    run = new_run("evaluated", *SMALL_ENGINE, job=JOB).start()
    pins = run.output / "evaluations"
    run.wait_until(
        lambda: any(pins.glob(".step-*.pin/model.safetensors")), "evaluation of a checkpoint"
    )
    run.kill("evaluator-0")
    assert run.wait(500) == 0, run.terminal[-4000:]
    found = results(run)
    assert {0, 60} <= found.keys()
    overtaken = {step for each in found.values() for step in each["overtaken"]}
    assert found.keys() | overtaken == {0, 20, 40, 60}
    for step, each in found.items():
        assert each["failed"] == {}
        assert each["sets"]["one-digit-sums"]["policy_version"] == step
        assert (
            each["sets"]["one-digit-sums"]["num_prompts"],
            each["sets"]["one-digit-sums"]["failures"],
        ) == (64, {})
    first, last = (found[step]["sets"]["one-digit-sums"]["pass_at"]["1"] for step in (0, 60))
    assert first["high"] < last["low"], "it has learned, beyond the intervals"
    assert evaluated_records(run) == list(found)
    assert sorted(path.name for path in pins.iterdir()) == sorted(
        f"step-{step}.json" for step in found
    )
    summary = run.summary
    assert summary["restarts_by_process"] == {"evaluator-0": 1}
    assert summary["evaluation"]["one-digit-sums"]["step"] == 60
    assert summary["evaluation"]["one-digit-sums"]["pass_at"]["1"]["mean"] == pytest.approx(
        last["mean"], abs=1e-5
    )
    assert "training is finished; evaluating step 60" in run.terminal
    assert "step 60 evaluated: one-digit-sums pass@1" in run.terminal
    assert "one-digit-sums: pass@k" in (run.output / "report.html").read_text()
    assert run.leftovers() == []


def test_an_interrupted_run_goes_on_and_evaluates_nothing_twice(
    new_run: Callable[..., Run],
) -> None:
    run = new_run("resumed", "--max-steps", "24", *SMALL_ENGINE, job=JOB).start()
    run.wait_until(lambda: 0 in results(run), "result of the initial weights")
    run.wait_for_step(11)
    run.signal(signal.SIGINT)
    assert run.wait(120) == 130, run.terminal[-4000:]
    before = {
        step: (run.output / "evaluations" / f"step-{step}.json").stat().st_mtime_ns
        for step in results(run)
    }
    run.start()
    assert run.wait(400) == 0, run.terminal[-4000:]
    found = results(run)
    assert max(found) == 24, "the last step is evaluated, though everySteps does not divide it"
    assert {
        step: (run.output / "evaluations" / f"step-{step}.json").stat().st_mtime_ns
        for step in before
    } == before
    assert evaluated_records(run) == list(found)
    assert run.leftovers() == []
