"""Whole runs: learning, resuming, and every process killed in turn."""

import signal
import time
from collections.abc import Callable

import pytest
from safetensors.numpy import load_file

from up_run import Run

SERVICES = ("nats-server", "preprocessor-0", "generator-0-0", "trainer-0", "actor-0")

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(600)]

EVERY_STEP = ("--set", "trainers.checkpoint.everySteps=1")


def assert_nothing_trained_twice(run: Run, num_steps: int) -> None:
    trained = run.trained
    assert [line["step"] for line in trained] == list(range(num_steps))
    groups = [group["group_id"] for line in trained for group in line["groups"]]
    prompts = [group["prompt_index"] for line in trained for group in line["groups"]]
    assert len(set(groups)) == len(groups)
    assert len(set(prompts)) == len(prompts)


def assert_ended_without_leftovers(run: Run) -> None:
    deadline = time.monotonic() + 20
    while run.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run.leftovers() == []


def test_the_demo_learns_with_weights_swapped_in_flight(new_run: Callable[..., Run]) -> None:
    run = new_run("demo").start()
    assert run.wait() == 0, run.terminal[-4000:]
    summary = run.summary
    assert summary["reward_first"] <= 0.3
    assert summary["reward_last"] >= 0.8
    assert summary["weight_updates"] >= 30
    assert summary["lag_max"] > 0
    assert summary["lag_mean"] > 0
    assert 0 < summary["ess_min"] <= summary["ess_mean"] <= 1
    assert summary["restarts"] == 0
    assert summary["tokens_trained"] <= summary["tokens_generated"]
    assert (run.output / "report.html").stat().st_size > 10_000
    assert (run.output / "final" / "model.safetensors").exists()
    assert_nothing_trained_twice(run, summary["steps"])
    assert_ended_without_leftovers(run)


def test_adapters_learn_and_nothing_else_is_sent(new_run: Callable[..., Run]) -> None:
    run = new_run(
        "adapters", "--max-steps", "40", job=Run.job.parent / "arithmetic-lora.yaml"
    ).start()
    assert run.wait() == 0, run.terminal[-4000:]
    summary = run.summary
    assert summary["reward_first"] <= 0.3
    assert summary["reward_last"] >= 0.7
    assert summary["weight_updates"] >= 20
    assert summary["restarts"] == 0
    adapter = load_file(run.output / "final" / "adapter" / "adapter_model.safetensors")
    sent = {values["update_bytes"] for values in run.steps if "update_bytes" in values}
    assert sent == {sum(tensor.nbytes for tensor in adapter.values())}
    whole = (run.output / "final" / "model.safetensors").stat().st_size
    assert sent.pop() < whole / 4
    assert_nothing_trained_twice(run, summary["steps"])
    assert_ended_without_leftovers(run)


def test_every_process_may_be_killed_during_training(new_run: Callable[..., Run]) -> None:
    run = new_run("kills", "--max-steps", "24", *EVERY_STEP).start()
    for number, name in enumerate(
        ["actor-0", "preprocessor-0", "nats-server", "generator-0-0", "trainer-0"]
    ):
        run.wait_for_step(2 + 4 * number)
        run.kill(name)
    assert run.wait(400) == 0, run.terminal[-4000:]
    assert run.summary["steps"] == 24
    assert run.summary["restarts"] >= 5
    assert_nothing_trained_twice(run, 24)
    assert_ended_without_leftovers(run)


def test_an_interrupted_run_goes_on_where_it_stopped(new_run: Callable[..., Run]) -> None:
    run = new_run("resumed", "--max-steps", "10").start()
    run.wait_for_step(4)
    run.signal(signal.SIGINT)
    assert run.wait(90) == 130, run.terminal[-4000:]
    assert_ended_without_leftovers(run)
    before = run.summary["steps"]
    assert 4 <= before < 10
    run.start()
    run.wait_for_step(before + 2)
    run.signal(signal.SIGKILL)  # without a warning: no process may outlive `up`
    run.wait(30)
    assert_ended_without_leftovers(run)
    run.start()
    assert run.wait() == 0, run.terminal[-4000:]
    assert run.summary["steps"] == 10
    assert_nothing_trained_twice(run, 10)


def test_two_runs_on_one_machine_do_not_meet_and_one_folder_takes_one_run(
    new_run: Callable[..., Run],
) -> None:
    conventional = Run.job.parent / "arithmetic-conventional.yaml"
    one = new_run("one", "--max-steps", "2").start()
    two = new_run(
        "two", "--max-steps", "2", "--set", "staleness.stepsPerGeneration=1", job=conventional
    ).start()
    one.wait_until(lambda: bool(one.pids("preprocessor-0")), "preprocessor")
    third = new_run("one").start()
    assert third.wait(60) == 2
    assert "is running in it; stop that one first or choose another --output" in third.terminal
    assert one.wait(400) == 0, one.terminal[-4000:]
    assert two.wait(400) == 0, two.terminal[-4000:]
    assert two.summary["lag_max"] == 0


def test_two_ranks_train_every_row_together(new_run: Callable[..., Run]) -> None:
    shared = ("--set", "trainers.processesPerNode=2", "--set", "trainers.sequenceParallelSize=2")
    run = new_run("shared", "--max-steps", "4", *shared).start()
    assert run.wait(400) == 0, run.terminal[-4000:]
    assert run.summary["steps"] == 4
    assert run.summary["restarts"] == 0
    assert run.summary["tokens_trained"] <= run.summary["tokens_generated"]
    assert_nothing_trained_twice(run, 4)


def test_memory_is_flat_over_two_thousand_groups(new_run: Callable[..., Run]) -> None:
    run = new_run("soak", "--max-steps", "132").start()
    run.wait_for_step(65)  # 32 groups a step
    before = {name: run.memory_bytes(name) for name in SERVICES}
    run.wait_for_step(129)
    after = {name: run.memory_bytes(name) for name in SERVICES}
    assert run.wait() == 0, run.terminal[-4000:]
    assert min(before.values()) > 0
    grown = {
        name: (before[name], after[name])
        for name in SERVICES
        if after[name] > 1.05 * before[name] + 24 * 2**20
    }
    assert grown == {}
