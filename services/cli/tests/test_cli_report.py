"""The pages hold what a reader looks for, and nothing from elsewhere."""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.report.charts import heat, plot, svg_file
from pipelinerl_cli.report.figures import rates, reward_axis, throughput
from pipelinerl_cli.report.svg import (
    Axis,
    Line,
    clock,
    clock_ticks,
    compact,
    duration,
    smooth,
    thin,
    ticks,
)
from pipelinerl_common.runs.history import RunHistory, SeriesPoint
from pipelinerl_common.runs.records import MetricsWriter, Record

JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: sums}
spec: {model: {uri: "tiny://arithmetic"}, task: {path: "tasks:Sums"}, seed: 11}
"""


def make_run(
    root: Path, rewards: Sequence[float], seconds_per_step: float = 1.0, job: str = JOB
) -> Path:
    """A run with one step per reward; it begins 10 s before the first step."""
    root.mkdir(parents=True)
    (root / "job.yaml").write_text(job)
    writer = MetricsWriter.open(root / "metrics.jsonl", now=0)
    writer.write(Record("up", "up", 1000, -1, {"session_started": 1, "restarts_total": 0}))
    for k, reward in enumerate(rewards, start=1):
        time = 1010 + k * seconds_per_step
        values = {
            "reward_mean": reward,
            "num_sequences": 4.0,
            "num_trained_tokens": 50.0,
            "lag_mean": 1.0,
            "lag_max": 2.0,
        }
        writer.write(
            Record("actor", "actor-0", time - 0.5, -1, {"tokens_generated_total": 60.0 * k})
        )
        writer.write(
            Record(
                "preprocessor",
                "preprocessor-0",
                time - 0.4,
                -1,
                {"queue_groups{stage=ready}": 3.0, "queue_groups{stage=running}": 8.0},
            )
        )
        writer.write(
            Record("trainer", "trainer-0", time, k, {**values, "ess": 0.95, "pause_seconds": 0.02})
        )
    writer.close()
    return root


def test_report_tells_of_steps_that_were_done_again(tmp_path: Path) -> None:
    """Three of five steps are lost with the trainer; four more end the run."""
    run = make_run(tmp_path / "run", [0.5] * 5)
    assert main(["report", str(run)]) == 0
    assert "done again" not in (run / "report.html").read_text()
    writer = MetricsWriter.open(run / "metrics.jsonl", now=1020)
    for k in range(4):
        values = {"reward_mean": 0.5, "num_sequences": 4.0, "num_trained_tokens": 40.0}
        tokens = {"tokens_generated_total": 300.0 + 50 * k}
        writer.write(Record("actor", "actor-0", 1020.0 + k, -1, tokens))
        writer.write(Record("trainer", "trainer-0", 1020.5 + k, 3 + k, values))
    writer.close()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "3 steps were done again after a return to a checkpoint" in page
    fates = re.sub(r"<[^>]*>", "", page.partition("What became of the generated tokens")[2])
    assert "trained 260 57.8%" in fates  # 2 steps of 50 and 4 of 40, of 450
    assert "trained in steps that were done again 150 33.3%" in fates
    assert "waiting, running or lost at the end 40 8.9%" in fates


def test_report_holds_every_plot_the_summary_and_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [k / 20 for k in range(20)])
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    captions = re.findall(r"<figcaption>([^<]*)", page)
    assert captions == [
        "Reward over time",
        "Reward over trajectories",
        "Loss",
        "Entropy (nats per token)",
        "Gradient norm",
        "Length of completions (tokens)",
        "Share of the tokens whose importance ratio was clipped",
        "Lag of the trained tokens (steps)",
        "Effective sample size (1 is on-policy)",
        "Queue depth (groups)",
        "What became of the generated tokens",
        "Tokens per second",
        "Where a step&#39;s time goes",
        "Pause and transfer of a weight update",
        "Packing",
    ]
    empty = re.findall(
        r'<figcaption>([^<]*)(?:<span class="legend">.*?</span></span>)?</figcaption><p '
        r'class="empty">',
        page,
    )
    missing = [
        *captions[2:8],
        "Where a step&#39;s time goes",
        "Packing",
    ]  # no data for these: the page says so
    assert empty == missing
    assert page.count("data-plot ") == len(captions) - len(empty) - 1  # a bar is no plot
    assert "trained <b>1k</b> <span>83.3%</span>" in page  # 20 steps of 50 tokens of 1200
    assert "at the end <b>200</b> <span>16.7%</span>" in page
    assert "0.100 → 0.850" in page  # means of 0, .05, .1, .15, .2 and of .75 .. .95
    assert "seed: 11" in page
    assert "running" in page  # no summary.json yet


def test_report_says_what_the_doctor_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [0.5] * 40)
    main(["report", str(run)])
    capsys.readouterr()
    main(["doctor", str(run)])
    said = capsys.readouterr().out
    page = (run / "report.html").read_text()
    messages = re.findall(r"^(?:CRITICAL|WARNING|ADVICE) +(.*?)  \[", said, flags=re.MULTILINE)
    assert messages
    assert [
        html.unescape(each)
        for each in re.findall(r'<span class="badge \w+">\w+</span> (.*?)<ul>', page)
    ] == messages


def test_time_of_the_plots_begins_with_the_first_token(tmp_path: Path) -> None:
    records = [
        Record("up", "up", 1000, -1, {"session_started": 1}),
        Record("actor", "actor-0", 1030, -1, {"tokens_generated_total": 0.0}),
        Record("actor", "actor-0", 1031, -1, {"tokens_generated_total": 5.0}),
        Record("trainer", "trainer-0", 1034, 1, {"reward_mean": 0.5}),
    ]
    history = RunHistory(records)
    assert history.training_seconds == 4
    trained = history.in_training_time()
    assert [(step.step, step.t) for step in trained.steps] == [(1, 4.0)]
    assert trained.gauge("actor", "tokens_generated_total") == [
        SeriesPoint(0, 0),
        SeriesPoint(1, 5),
    ]
    assert history.steps[0].t == 34


def test_no_line_is_below_a_band_and_rewards_from_0_to_1_have_that_axis() -> None:
    band = Line("a", [0, 1], [0.9, 1.0], 1, "band", [0.2, 0.4])
    drawn = plot("reward", Axis("step"), reward_axis([band]), [Line("b", [0, 1], [0.3, 0.5]), band])
    assert drawn.index("<polygon") < drawn.index("<polyline")
    assert (reward_axis([band]).low, reward_axis([band]).high) == (0, 1)
    below = replace(band, floor=[-0.1, 0.4])
    assert (reward_axis([below]).low, reward_axis([below]).high) == (None, None)


def test_actors_that_came_or_went_are_drawn_over_the_steps(tmp_path: Path) -> None:
    records = [Record("up", "up", 1000, -1, {"session_started": 1})]
    records += [
        Record("trainer", "trainer-0", 1010 + 10 * step, step, {"reward_mean": 0.5})
        for step in (1, 2, 3, 4)
    ]
    same = RunHistory(
        [*records, Record("up", "up", 1001, -1, {"actors_desired": 2.0, "actors_ready": 2.0})]
    )
    assert "<figcaption>Actors" not in "".join(throughput(same))
    sizes = [(1001, 2.0, 0.0), (1005, 2.0, 2.0), (1025, 1.0, 2.0), (1031, 1.0, 1.0)]
    records += [
        Record("up", "up", time, -1, {"actors_desired": want, "actors_ready": ready})
        for time, want, ready in sizes
    ]
    trained = RunHistory(sorted(records, key=lambda record: record.time)).in_training_time()
    assert trained.at_steps("up", "actors_desired") == [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert trained.at_steps("up", "actors_ready") == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)]
    assert "ready: from 2 to 1, between 1 and 2." in "".join(throughput(trained))


def test_a_step_by_its_lags_has_one_cell_per_lag_that_occurs(tmp_path: Path) -> None:
    columns: dict[float, list[float]] = {1: [1.0] + [0.0] * 16, 2: [0.25, 0.0, 0.75] + [0.0] * 14}
    mean = Line("mean", [1, 2], [0.0, 1.5])
    drawn = heat("lag", Axis("step"), Axis("lag"), columns, "16+", mean)
    assert drawn.count('class="cell"') == 3
    assert [float(opacity) for opacity in re.findall(r'fill-opacity="([0-9.]+)"', drawn)] == [
        1,
        0.44,
        0.84,
    ]  # share to the power 0.6
    assert "mean: from 0 to 1.5, between 0 and 1.5." in drawn


def test_page_needs_nothing_from_elsewhere_and_has_light_and_dark(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5)
    main(["report", str(run)])
    page = (run / "report.html").read_text()
    assert not re.search(r'(src|href)="|@import|url\(', page)
    assert "http://" not in page
    assert "https://" not in page
    assert "prefers-color-scheme: dark" in page
    assert "@media" in page
    assert len(page) < 200_000


def test_text_of_the_job_cannot_break_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5)
    (run / "job.yaml").write_text(
        JOB.replace("tiny://arithmetic", "tiny://<script>alert(1)</script>")
    )
    main(["report", str(run)])
    page = (run / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_broken_summary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5)
    (run / "summary.json").write_text("[]")
    assert main(["report", str(run)]) == 2
    assert "not a summary of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 0.83, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 3, [0, 1, 2, 3]),
        (5, 5, [2, 3, 4, 5, 6, 7, 8]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_cover_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_clock_ticks_are_round_on_a_clock() -> None:
    assert clock_ticks(0, 250) == [0, 60, 120, 180, 240, 300]
    assert clock_ticks(0, 0) == [0, 1]
    assert clock_ticks(0, 86400 * 30)[1] == 86400 * 5


def test_numbers_are_written_for_people() -> None:
    assert [compact(value) for value in (0, 0.25, 12.345, 1500, 2e6, 3e9)] == [
        "0",
        "0.25",
        "12.3",
        "1.5k",
        "2M",
        "3G",
    ]
    assert [clock(value) for value in (45, 90, 3700)] == ["45 s", "1:30", "1:01:40"]
    assert [duration(value) for value in (0.05, 2.5)] == ["50 ms", "2.5 s"]


def test_running_mean_and_rates_by_hand() -> None:
    assert smooth([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert smooth([1, math.nan, 3, math.nan, math.nan], 2)[:4] == [1, 1, 3, 3]
    assert math.isnan(smooth([1, math.nan, math.nan], 2)[2])
    points = [
        SeriesPoint(0, 0),
        SeriesPoint(2, 10),
        SeriesPoint(6, 60),
        SeriesPoint(12, 0),
        SeriesPoint(20, 80),
    ]
    assert rates(points, window_s=5) == [
        SeriesPoint(6, 10),
        SeriesPoint(12, 0),
        SeriesPoint(20, 10),
    ]


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    ys = [0.0] * 10000
    ys[5003], ys[7001] = 9.0, -4.0
    xs, kept = thin(list(range(10000)), ys, most=100)
    assert len(xs) <= 104
    assert (xs[0], xs[-1]) == (0, 9999)
    assert 9.0 in kept
    assert -4.0 in kept


def test_band_is_drawn_from_its_lowest_to_its_highest_and_is_not_named(tmp_path: Path) -> None:
    lines = [
        Line("a", [0, 1], [3.0, 4.0], 0, "band", [-1.0, 2.0]),
        Line("a", [0, 1], [1.0, 3.0], 0),
        Line("b", [0, 1], [1.0, 2.0], 1),
    ]
    drawn = plot("t", Axis("x"), Axis("y"), lines)
    assert drawn.count('<polygon class="band c0"') == 1
    assert drawn.count('data-label="a"') == drawn.count('class="key line c0"') == 1
    assert 'data-y0="-1"' in drawn, "the axis has room for the lowest of the band"
    assert drawn.count("a: from 1 to 3, between 1 and 3.") == 1
    assert "from 3" not in drawn


def test_plot_as_a_file_is_svg_with_its_own_colours_title_and_keys() -> None:
    text = svg_file(
        "Reward & time",
        Axis("x"),
        Axis("y"),
        [Line("one", [0, 1], [0, 1]), Line("two", [0, 1], [1, 0], 1)],
    )
    root = ElementTree.fromstring(text)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    said = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert names[0] == "svg"
    assert names.count("polyline") == text.count('<line class="key ') == 2, "lines and their keys"
    assert {"Reward & time", "one", "two", "x"} <= set(said)
    assert "--c0" in text
    assert "no data" in svg_file("empty", Axis("x"), Axis("y"), [])


def test_plot_leaves_out_what_is_not_a_number_and_draws_a_single_point() -> None:
    line = Line("a", [0, 1, 2], [1.0, float("nan"), float("inf")])
    drawn = plot("t", Axis("x"), Axis("y"), [line])
    assert "<circle" in drawn
    assert "nan" not in drawn
    assert "inf" not in drawn
