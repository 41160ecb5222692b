"""Numbers worked out by hand."""

import json
import math
from pathlib import Path

import pytest

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.runs.history import LAG_BUCKETS, RunHistory, SeriesPoint, mean_over_time
from pipelinerl_common.runs.records import (
    MetricsWriter,
    Record,
    counter_total,
    parse_record,
    read_records,
)
from pipelinerl_common.runs.summary import summarize


def step(number: int, time: float, **values: float) -> Record:
    defaults = {"reward_mean": number / 10, "num_sequences": 8.0, "num_trained_tokens": 100.0}
    return Record("trainer", "trainer-0", time, number, {**defaults, **values})


def session(time: float) -> Record:
    return Record("up", "up", time, -1, {"session_started": 1.0, "restarts_total": 0.0})


def actor(time: float, total: float, instance: str = "actor-0") -> Record:
    return Record("actor", instance, time, -1, {"tokens_generated_total": total})


@pytest.mark.parametrize(
    ("values", "total"),
    [([], 0), ([4], 4), ([3, 5, 9], 9), ([3, 5, 1, 4], 9), ([3, 3, 3], 3), ([10, 0, 0, 2], 12)],
)
def test_counter_total_goes_on_over_restarts_of_its_process(
    values: list[float], total: float
) -> None:
    assert counter_total(values) == total


def test_time_between_sessions_does_not_count() -> None:
    time = RunHistory([session(100), step(1, 110), step(2, 130), session(1000), step(3, 1005)]).time
    assert time.total == 35
    assert [time.at(t) for t in (100, 110, 130, 500, 1000, 1005)] == [0, 10, 30, 30, 30, 35]


def test_summary_of_a_small_run() -> None:
    records = [
        session(0),
        actor(4, 0),
        actor(10, 0),
        *[
            step(
                number,
                10 + number,
                lag_mean=1.0 if number < 6 else 3.0,
                lag_max=float(number),
                ess=1 - number / 100,
                num_trained_tokens=100.0 if number < 6 else 300.0,
                pause_seconds=0.02 * number,
                transfer_seconds=0.1,
                weight_updates_total=float(number),
            )
            for number in range(1, 7)
        ],
        actor(18, 1000),
        actor(20, 500, "actor-1"),
        Record(
            "preprocessor",
            "preprocessor-0",
            15,
            -1,
            {"groups_dropped_total{reason=stale}": 2.0, "groups_dropped_total{reason=full}": 0.0},
        ),
        Record("up", "up", 20, -1, {"restarts_total": 1.0, "restarts_actor-0_process_total": 1.0}),
    ]
    summary = summarize(RunHistory(records), status="finished", job="sums", seed=7)
    assert summary == {
        "job": "sums",
        "status": "finished",
        "seed": 7,
        "steps": 6,
        "seconds": 20,
        # from the last record without a token, at 10, to the newest token at 20
        "training_seconds": 10,
        "reward_first": 0.2,  # mean of 0.1 .. 0.3
        "reward_last": 0.5,  # mean of 0.4 .. 0.6
        "reward_max": 0.6,
        "success_last": None,
        "lag_max": 6,
        "lag_mean": 1.75,  # (5 * 100 * 1 + 300 * 3) / 800
        "ess_min": 0.94,
        "ess_mean": 0.965,  # 1 - 0.21 / 6
        "weight_updates": 6,
        "weight_update_failures": 0,
        "pause_seconds_mean": 0.07,  # 0.02 * 21 / 6
        "transfer_seconds_mean": 0.1,
        "samples_trained": 48,
        "tokens_generated": 1500,
        "tokens_trained": 800,
        "waste": 0.466667,  # 700 of 1500
        "tokens_per_second": 150,  # 1500 in the 10 s from 10 to 20
        "dropped_groups": {"stale": 2},
        "rollout_errors": {},
        "restarts": 1,
        "restarts_by_process": {"actor-0": 1},
        "evaluation": {},
        "evaluations_failed": 0,
        "evaluations_skipped": {},
    }


def test_summary_of_a_run_without_a_step_is_valid_json_without_numbers() -> None:
    summary = summarize(RunHistory([session(0)]), status="failed", job="sums", seed=0)
    assert summary["steps"] == 0
    assert summary["reward_last"] is None
    assert summary["waste"] is None
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("num_steps", "first", "last"),
    [(1, 0.1, None), (2, 0.1, 0.2), (3, 0.1, 0.3), (9, 0.25, 0.75), (12, 0.3, 1.0)],
)
def test_first_and_last_rewards_never_share_a_step(
    num_steps: int, first: float, last: float | None
) -> None:
    """9 steps give the means of 0.1 .. 0.4 and of 0.6 .. 0.9; 12 those of five each."""
    history = RunHistory(
        [session(0), *(step(number, number) for number in range(1, num_steps + 1))]
    )
    summary = summarize(history, status="finished", job="sums", seed=0)
    assert (summary["reward_first"], summary["reward_last"]) == (first, last)
    assert not {each.step for each in history.first_steps} & {
        each.step for each in history.last_steps
    }


def test_step_that_was_trained_again_after_a_crash_counts_once_with_its_last_values() -> None:
    records = [
        session(0),
        step(1, 1),
        step(2, 2, reward_mean=0.9),
        step(2, 9, reward_mean=0.4),
        step(3, 10),
    ]
    history = RunHistory(records)
    assert [(each.step, each.samples) for each in history.steps] == [(1, 8), (2, 16), (3, 24)]
    assert history.steps[1].get("reward_mean") == 0.4


def test_steps_that_a_return_to_a_checkpoint_made_void_do_not_count() -> None:
    records = [
        session(0),
        *(step(number, number) for number in range(1, 8)),
        session(20),
        step(3, 21),
        step(4, 22),
    ]
    assert [each.step for each in RunHistory(records).steps] == [1, 2, 3, 4]


def test_restarts_of_all_sessions_add_up() -> None:
    restarts = [1.0, 0.0, 2.0]  # one in the first session; the second begins at 0 and comes to 2
    records = [
        Record("up", "up", float(k), -1, {"restarts_total": value})
        for k, value in enumerate(restarts)
    ]
    assert summarize(RunHistory(records), status="finished", job="x", seed=0)["restarts"] == 3


def test_values_that_are_not_numbers_are_left_out_of_means() -> None:
    records = [session(0), step(1, 1, ess=math.nan), step(2, 2, ess=0.5)]
    assert summarize(RunHistory(records), status="finished", job="x", seed=0)["ess_mean"] == 0.5


def test_gauge_adds_what_each_instance_said_last() -> None:
    history = RunHistory([session(0), actor(1, 10), actor(2, 5, "actor-1"), actor(3, 20)])
    assert [
        (point.t, point.value) for point in history.gauge("actor", "tokens_generated_total")
    ] == [(1, 10), (2, 15), (3, 25)]


def test_mean_of_a_gauge_counts_how_long_each_value_held() -> None:
    points = [SeriesPoint(0, 4.0), SeriesPoint(2, 1.0), SeriesPoint(4, 99.0)]
    assert mean_over_time(points, 0, 3) == pytest.approx(3)  # (2 * 4 + 1 * 1) / 3
    assert mean_over_time(points, 1, 3) == pytest.approx(2.5)  # (1 * 4 + 1 * 1) / 2
    assert mean_over_time(points[1:2], 0, 2) == 1
    assert math.isnan(mean_over_time(points[2:], 0, 3))


def test_records_survive_the_file_and_null_stands_for_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter.open(path, now=0)
    assert writer.write(step(1, 5, loss=math.inf, ess=0.5))
    writer.close()
    assert json.loads(path.read_text())["values"]["loss"] is None
    (record,) = read_records(path)
    assert math.isnan(record.values["loss"])
    assert (record.role, record.instance, record.time, record.step, record.values["ess"]) == (
        "trainer",
        "trainer-0",
        5,
        1,
        0.5,
    )


def test_replayed_records_are_not_written_twice_over_two_sessions(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter.open(path, now=0)
    assert first.write(step(1, 5))
    assert not first.write(step(1, 5))
    first.close()
    taken: list[Record] = []
    second = MetricsWriter.open(path, now=100, take=taken.append)
    assert [record.step for record in taken] == [1]
    assert not second.write(step(1, 5))
    assert second.write(step(2, 6))
    assert second.write(actor(1, 10))  # another instance has its own time
    second.close()
    assert [record.step for record in read_records(path)] == [1, 2, -1]


def test_line_that_a_crash_cut_short_is_dropped_and_the_next_record_has_its_own_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step(1, 5).to_json() + "\n" + step(2, 6).to_json()[:30])
    assert [record.step for record in read_records(path)] == [1]
    writer = MetricsWriter.open(path, now=0)
    writer.write(step(3, 7))
    writer.close()
    assert [record.step for record in read_records(path)] == [1, 3]


def test_records_between_steps_are_thinned_as_the_run_grows_old_and_steps_never(
    tmp_path: Path,
) -> None:
    writer = MetricsWriter.open(tmp_path / "metrics.jsonl", now=0)
    for second in range(1, 36001):
        writer.write(actor(float(second), second))
        if second % 3600 == 0:
            writer.write(step(second // 3600, second + 0.5))
    writer.close()
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert sum(record.step >= 0 for record in records) == 10
    assert 3600 < sum(record.step < 0 for record in records) < 3600 * (2 + math.log(10))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"role": "x"}',
        '{"role": "x", "instance": "y", "time": "z", "step": 1, "values": {}}',
    ],
)
def test_file_that_is_not_metrics_is_refused_with_its_line_number(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{step(1, 1).to_json()}\n{line}\n")
    with pytest.raises(SettingsError, match=r"metrics\.jsonl: line 2"):
        list(read_records(path))


def test_record_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="not a metrics record"):
        parse_record('{"role": "x", "values": 3}')


def test_lags_of_a_step_are_what_the_trainers_counts_grew_by() -> None:
    def trained(step: int, at_0: float, at_1: float, all_: float) -> Record:
        counts = {name: at_1 for name in LAG_BUCKETS} | {
            LAG_BUCKETS[0]: at_0,
            LAG_BUCKETS[-1]: all_,
        }
        return Record("trainer", "trainer-0", float(step), step, {"reward_mean": 0.0, **counts})

    first, second, third = RunHistory(
        [trained(1, 5, 9, 9), trained(2, 6, 12, 15), trained(3, 4, 4, 4)]
    ).steps
    assert (first.tokens_by_lag[:2], sum(first.tokens_by_lag)) == ((5, 4), 9)
    assert (second.tokens_by_lag[:2], second.tokens_by_lag[-1]) == ((1, 2), 3)
    assert (third.tokens_by_lag[0], sum(third.tokens_by_lag)) == (4, 4), "its process began again"


def resumed() -> list[Record]:
    """100 s of start-up in the first session, 300 in the second, of which the first counts 10 s and
    the second 16.
    """
    return [
        session(0),
        actor(100, 0),
        actor(101, 30),
        step(1, 110, step_seconds=4.0, wait_seconds=1.0),
        actor(140, 30),  # idle up to the end
        session(1000),
        actor(1200, 0),
        step(
            2, 1304, step_seconds=104.0, wait_seconds=100.0
        ),  # of samples that waited; it had them at 1300
        actor(1305, 0),
        actor(1306, 230),
        step(3, 1316),
        Record("up", "up", 1400, -1, {"restarts_total": 0.0}),
    ]


def test_start_up_and_shutdown_of_no_session_are_training() -> None:
    history = RunHistory(resumed())
    summary = summarize(history, status="finished", job="sums", seed=0)
    assert (summary["training_seconds"], summary["tokens_per_second"]) == (
        26,
        10,
    )  # 100 to 110, 1300 to 1316; 260 tokens
    assert summary["seconds"] == 540
    trained = history.in_training_time()
    assert [each.t for each in trained.steps] == [10, 14, 26]
    counted = [(point.t, point.value) for point in trained.gauge("actor", "tokens_generated_total")]
    assert counted == [(0, 0), (1, 30), (15, 0), (16, 230)]


def test_a_session_that_ends_in_its_start_up_changes_no_mean() -> None:
    idle = [session(2000), actor(2100, 0), actor(2400, 0)]
    before, after = (
        summarize(RunHistory(records), status="interrupted", job="sums", seed=0)
        for records in (resumed(), resumed() + idle)
    )
    assert after["seconds"] == before["seconds"] + 400
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
