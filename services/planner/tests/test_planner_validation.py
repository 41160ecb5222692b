"""A recorded live run and its simulation, and the errors for folders that cannot be simulated.

`recorded_run` is a run of 24 steps on two CPU cores beside other work: a tiny Qwen3 in vLLM, areal
with eta=2. Its event log is cut down to what is read here; take events that only waited are left
out, except the first of each step.
"""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_planner.recorded_run import read_recorded_run
from pipelinerl_planner.validation import fit_cluster, validate

RECORDED = Path(__file__).parent / "recorded_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes(gzip.decompress((RECORDED / f"{name}.gz").read_bytes()))
    shutil.copy(RECORDED / "job.yaml", tmp_path)
    return tmp_path


def rewrite(path: Path, change: Callable[[list[Any]], list[Any] | None]) -> None:
    """Changes every event; None leaves it out."""
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))


def test_a_live_run_and_its_simulation_agree_within_five_percent(folder: Path) -> None:
    """Measured 36.1 s, 21.0 requests, 10.6 %; simulated 34.9 s, 20.8 requests, 11.1 %."""
    for comparison in validate(folder).comparisons:
        assert abs(comparison.difference) <= 0.05, comparison


def test_the_measured_side_is_the_recording_itself(folder: Path) -> None:
    """Duration from the first published version to the last commit, means from the engine's
    integrals.
    """
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began = next(at for at, method, *_ in events if method == "published")
    ended = [at for at, method, *_ in events if method == "step_done"][-1]
    recorded = read_recorded_run(folder)
    assert recorded.seconds == pytest.approx(ended - began)
    loads = [
        (at, values)
        for at, method, values, _ in events
        if method == "load" and began <= at <= ended
    ]
    (first_at, first), (last_at, last) = loads[0], loads[-1]
    assert recorded.mean_running == pytest.approx((last[11] - first[11]) / (last_at - first_at))
    assert recorded.mean_kv_usage == pytest.approx((last[12] - first[12]) / (last_at - first_at))


def test_the_costs_account_for_the_measured_time_of_the_decode_steps(folder: Path) -> None:
    """Steps, their tokens, the context that they read and prefilled tokens, at the fitted costs."""
    recorded = read_recorded_run(folder)
    cluster = fit_cluster(recorded)
    first, last = recorded.settled_loads()[0], recorded.settled_loads()[-1]
    steps, tokens = last.num_steps - first.num_steps, last.step_tokens - first.step_tokens
    prefilled = last.prefill_tokens - first.prefill_tokens
    context = sum(
        p * n + n * (n - 1) / 2 for p, sampled in recorded.lengths.values() for n in sampled
    )
    fitted = (
        steps * cluster.decode_step_s
        + tokens * cluster.decode_sequence_s
        + context * cluster.decode_token_s
    )
    fitted += prefilled / cluster.prefill_tokens_per_s
    assert fitted == pytest.approx(last.step_seconds - first.step_seconds, rel=0.01)


def test_nothing_of_the_whole_goes_into_the_model(folder: Path) -> None:
    """The same parts in a run that is said to have lasted longer, and to have had more in flight,
    are fitted to the same decode and training costs.
    """
    before = fit_cluster(read_recorded_run(folder))

    def stretched(event: list[Any]) -> list[Any]:
        if event[1] == "load":
            event[2][11] *= 1.5
            event[2][13] *= 1.5
        return event

    rewrite(folder / "events.jsonl", stretched)
    after = fit_cluster(read_recorded_run(folder))
    for name in (
        "decode_step_s",
        "decode_sequence_s",
        "decode_token_s",
        "prefill_tokens_per_s",
        "train_step_s",
        "publish_s",
    ):
        assert getattr(after, name) == pytest.approx(getattr(before, name)), name


@pytest.mark.parametrize("missing", ["events.jsonl", "metrics.jsonl", "job.yaml"])
def test_a_folder_that_lacks_a_file_is_told_by_its_name(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=re.escape(f"has no {missing}: give the --output folder")):
        validate(folder)


def without(method: str) -> Callable[[list[Any]], list[Any] | None]:
    return lambda event: None if event[1] == method else event


def without_blocks(event: list[Any]) -> list[Any]:
    if event[1] == "load":
        event[2][1] = 0
    return event


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("load"), "the engines reported their load 0 times while it trained, 5 are needed"),
        (without("step_done"), "0 steps were trained; costs are fitted from 4 on"),
        (without("policy"), "it has no start of a policy"),
        (
            without_blocks,
            "its engine has no KV blocks; record a run with actors.generator.engine: vllm",
        ),
    ],
    ids=["load", "steps", "policy", "blocks"],
)
def test_a_recording_that_lacks_what_is_needed_says_what(
    folder: Path,
    change: Callable[[list[Any]], list[Any] | None],
    message: str,
) -> None:
    rewrite(folder / "events.jsonl", change)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(folder)


def test_a_run_that_was_interrupted_is_refused(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join([*lines, lines[0]]))
    with pytest.raises(ValueError, match=re.escape("the preprocessor was restarted in this run")):
        validate(folder)


@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize(
    "line",
    [b"[]", b"{}", b"null", b'[1, "take", [0], [["0-999"], [], ""]]', b"\xff", b"[" * 100_000],
)
def test_a_broken_line_is_named_by_its_place(file: str, line: bytes, folder: Path) -> None:
    lines = (folder / file).read_bytes().splitlines(keepends=True)
    (folder / file).write_bytes(b"".join([*lines[:20], line + b"\n", *lines[20:]]))
    with pytest.raises(ValueError, match=re.escape(f"{file}:21: ")):
        validate(folder)
