"""What the evaluator found, where people look for it: on the terminal, in the summary, the report
and the comparison.
"""

import re
from pathlib import Path

import pytest

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.up.display import rows
from pipelinerl_cli.up.live_metrics import RunView
from pipelinerl_cli.up.session import evaluation_lines
from pipelinerl_cli.up.status_lines import evaluation_progress
from pipelinerl_common.runs.evaluations import evaluated, evaluation_line, evaluations
from pipelinerl_common.runs.history import RunHistory
from pipelinerl_common.runs.records import MetricsWriter, Record
from pipelinerl_common.runs.summary import summarize

JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: sums}
spec: {model: {uri: "tiny://arithmetic"}, task: {path: "tasks:Sums"}, seed: 11}
"""


def result(
    step: int, mean: float, *, name: str = "held-out", time: float = 0.0, failed: int = 0
) -> Record:
    """The result of one set with k = 4 and k = 1, reported in this order."""
    values = {
        **{
            f"evaluation_pass_ratio{edge}{{set={name},k=4}}": 0.9 + change
            for edge, change in _EDGES
        },
        **{
            f"evaluation_pass_ratio{edge}{{set={name},k=1}}": mean + change
            for edge, change in _EDGES
        },
        **{
            f"evaluation_reward{edge or '_mean'}{{set={name}}}": mean + change
            for edge, change in _EDGES
        },
        f"evaluation_tokens_mean{{set={name}}}": 2.5,
        f"evaluation_truncated_ratio{{set={name}}}": 0.125,
        f"evaluation_prompts{{set={name}}}": 64.0,
        "evaluation_sets_failed": float(failed),
        "evaluations_skipped_total{reason=overtaken}": 2.0,
        "evaluations_total{outcome=failed}": float(failed),
    }
    return Record("evaluator", "evaluator-0", time or 1000.0 + step, step, values)


_EDGES = (("", 0.0), ("_low", -0.05), ("_high", 0.05))


def trained(step: int) -> Record:
    return Record(
        "trainer", "trainer-0", 1000.5 + step, step, {"reward_mean": 0.5, "num_sequences": 4.0}
    )


def test_a_record_is_read_back_by_set_and_k() -> None:
    (found,) = evaluated(result(20, 0.25))
    assert (found.step, found.name, list(found.pass_at)) == (20, "held-out", [1, 4])
    assert str(found.pass_at[1]) == "0.250 (0.200 to 0.300)"
    assert (found.reward.mean, found.tokens_mean, found.truncated_ratio, found.num_prompts) == (
        0.25,
        2.5,
        0.125,
        64,
    )


def test_only_the_evaluators_results_count_and_of_a_step_the_last() -> None:
    records = [
        result(20, 0.1, time=1),
        result(0, 0.05, time=2),
        Record("evaluator", "evaluator-0", 3, -1, result(40, 1.0).values),
        result(20, 0.3, time=4),
        result(20, 0.7, name="hard", time=5),
        trained(20),
    ]
    found = evaluations(records)
    assert {
        name: [(each.step, each.pass_at[1].mean) for each in of] for name, of in found.items()
    } == {
        "held-out": [(0, 0.05), (20, 0.3)],
        "hard": [(20, 0.7)],
    }


def test_a_result_is_one_line() -> None:
    assert evaluation_line(result(20, 0.25)) == (
        "step 20 evaluated: held-out pass@1 0.250 (0.200 to 0.300), pass@4 0.900 (0.850 to 0.950), "
        "reward 0.250"
    )
    failed = Record("evaluator", "evaluator-0", 1, 40, {"evaluation_sets_failed": 2.0})
    assert evaluation_line(failed) == "step 40 evaluated: 2 set(s) failed, see logs/evaluator-0.log"
    assert evaluation_line(trained(20)) is None


def test_the_panel_has_a_row_for_each_set() -> None:
    view = RunView(steps_total=60)
    assert "held-out" not in [label for label, _, _ in rows(view, 10)]
    for record in (result(0, 0.0), result(20, 1.0)):
        assert not view.take(record), "an evaluation is no step"
    shown = {label: (numbers, trend) for label, numbers, trend in rows(view, 10)}
    assert shown["held-out"] == ("pass@1 1.000 at step 20", "▁█")


def test_progress_tells_the_set_that_is_being_answered() -> None:
    view = RunView(steps_total=60)
    sets = ("held-out", "hard")
    assert evaluation_progress(view, sets) == "waiting for the evaluator"
    planned = {f"evaluation_prompts_planned{{set={name}}}": 128.0 for name in sets}
    done = {
        "evaluation_prompts_done{set=held-out}": 128.0,
        "evaluation_prompts_done{set=hard}": 34.0,
    }
    view.take(
        Record(
            "evaluator", "evaluator-0", 1, -1, {**planned, **done, "evaluation_running_step": 0.0}
        )
    )
    assert evaluation_progress(view, sets) == "set hard 34/128"
    view.take(Record("evaluator", "evaluator-0", 2, -1, {"evaluation_running_step": -1.0}))
    assert evaluation_progress(view, sets) == "waiting for the evaluator"


def test_the_summary_has_the_newest_and_the_first_result_of_each_set() -> None:
    history = RunHistory([trained(1), result(0, 0.2), result(20, 0.5), result(60, 0.8, failed=1)])
    summary = summarize(history, status="finished", job="sums", seed=0)
    held_out = summary["evaluation"]["held-out"]
    assert (held_out["step"], held_out["prompts"]) == (60, 64)
    assert held_out["pass_at"]["1"] == {"mean": 0.8, "low": 0.75, "high": 0.85}
    assert (held_out["first"]["step"], held_out["first"]["pass_at"]["1"]["mean"]) == (0, 0.2)
    assert summary["evaluations_skipped"] == {"overtaken": 2}
    assert summary["evaluations_failed"] == 1
    assert evaluation_lines(summary) == [
        "held-out: pass@1 0.200 -> 0.800 (0.750 to 0.850), pass@4 0.900 -> 0.900 (0.850 to 0.950) "
        "at step 60"
    ]


def make_run(root: Path, means: dict[int, float]) -> Path:
    root.mkdir()
    (root / "job.yaml").write_text(JOB)
    writer = MetricsWriter.open(root / "metrics.jsonl", now=0)
    writer.write(Record("up", "up", 1000, -1, {"session_started": 1, "restarts_total": 0}))
    for step in range(1, 31):
        writer.write(trained(step))
    for step, mean in means.items():
        writer.write(result(step, mean))
    writer.close()
    return root


def test_the_report_draws_each_set_with_its_band(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {0: 0.2, 20: 0.5, 30: 0.8})
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    captions = re.findall(r"<figcaption>([^<]*)", page)
    assert captions[captions.index("held-out: pass@k") :][:3] == [
        "held-out: pass@k",
        "held-out: reward",
        "held-out: tokens per answer",
    ]
    assert page.count('<polygon class="band ') == 3  # of pass@1, pass@4 and the reward
    assert "0.200 → 0.800 (0.750 to 0.850)" in page
    assert "evaluations skipped: overtaken" in page


def test_a_comparison_has_the_newest_result_of_every_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_run(tmp_path / "one", {0: 0.2, 30: 0.8}), make_run(tmp_path / "two", {})
    assert main(["compare", str(one), str(two), "--output", str(tmp_path / "c.html")]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out pass@1")
    )
    assert line.split() == ["held-out", "pass@1", "0.800", "-"]
    assert "<figcaption>held-out: pass@1" in (tmp_path / "c.html").read_text()


def test_a_run_without_evaluation_is_shown_as_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {})
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Evaluation</h2>" not in page
    assert "pass@" not in page
