"""Runs side by side: what is timed, from when on, and which runs stand together. Numbers worked out
by hand.
"""

import math
import re
from pathlib import Path

import pytest
from test_cli_report import JOB, make_run

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.compare.runs import Compared, Variant, curve_of, load, variants
from pipelinerl_cli.compare.table import cell, differences, note, table
from pipelinerl_common.runs.records import Record


def with_seed(seed: int, steps: int = 1000) -> str:
    return JOB.replace("seed: 11", f"seed: {seed}, algorithm: {{steps: {steps}}}")


def row(compared: list[Variant], name: str, rewards: tuple[float, ...] = (0.5,)) -> list[str]:
    return next(cells[1:] for cells in table(compared, rewards)[1] if cells[0] == name)


def test_rewards_are_timed_from_the_first_token_and_every_run_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = make_run(tmp_path / "fast", [k / 20 for k in range(1, 21)], seconds_per_step=2)
    slow = make_run(tmp_path / "slow", [k / 40 for k in range(1, 21)], seconds_per_step=2)
    out = tmp_path / "compare.html"
    assert main(["compare", str(fast), str(slow), "--output", str(out), "--reward", "0.4"]) == 0
    said = capsys.readouterr().out
    # fast: the mean of 5 steps is (k-2)/20, 0.4 at step 10, 10 + 20 s after the start, and the
    # first token is seen after 11.5 s
    assert re.search(r"^time to 0\.4 +18 s +34 s$", said, re.MULTILINE)
    assert re.search(r"^trajectories to 0\.4 +40 +72$", said, re.MULTILINE)
    assert re.search(r"^tokens to 0\.4 +500 +900$", said, re.MULTILINE)
    assert re.search(r"^training time +38 s +38 s$", said, re.MULTILINE)
    assert re.search(r"^trajectories/s +2\.08 +2\.08$", said, re.MULTILINE)  # 80 in 38.5 s
    assert "leave out the start-up of every session" in said
    page = out.read_text()
    assert re.findall(r"<figcaption>([^<]*)", page) == [
        "Reward over time",
        "Reward over trajectories",
        "Reward over tokens",
        "Largest lag per step (steps)",
        "Effective sample size (1 is on-policy)",
        "Tokens generated per second",
    ]
    assert page.count('data-label="fast"') == page.count('data-label="slow"') == 6


def test_reward_that_was_never_reached_comes_with_the_best_mean(tmp_path: Path) -> None:
    """The last step alone is above it, as a reader of the run's last line sees."""
    (run,) = load([make_run(tmp_path / "run", [0.1] * 8 + [0.6])])
    assert run.first_reaching(0.5) is None
    assert row(variants([run]), "time to 0.5") == ["not reached, best 0.2"]


def test_run_that_is_too_short_for_a_mean_says_so(tmp_path: Path) -> None:
    (run,) = load([make_run(tmp_path / "run", [0.9] * 4)])
    assert row(variants([run]), "time to 0.5") == ["fewer than 5 steps"]


def test_single_lucky_steps_do_not_count_as_reaching(tmp_path: Path) -> None:
    (run,) = load([make_run(tmp_path / "run", [0.9, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0])])
    assert run.first_reaching(0.5) is None


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.8])
def test_reward_that_is_met_exactly_is_reached_whatever_its_sum_rounds_to(
    tmp_path: Path, reward: float
) -> None:
    (run,) = load([make_run(tmp_path / "run", [reward] * 12)])
    step = run.first_reaching(reward)
    assert step is not None
    assert step.step == 5


def test_step_without_a_reward_does_not_hide_those_after_it(tmp_path: Path) -> None:
    (run,) = load([make_run(tmp_path / "run", [0.9, 0.9, math.nan, 0.9, 0.9, 0.9])])
    step = run.first_reaching(0.8)
    assert step is not None
    assert step.step == 5


def test_rewards_of_selected_groups_are_told_apart(tmp_path: Path) -> None:
    """A batch without groups of equal rewards never has a mean near 1."""
    selecting = JOB.replace("seed: 11", "seed: 11, algorithm: {loss: dapo}")
    roots = [
        make_run(tmp_path / "all", [0.5] * 6),
        make_run(tmp_path / "some", [0.5] * 6, job=selecting),
    ]
    assert "The rewards of some are of the groups that were trained" in note(variants(load(roots)))
    assert "dropped" not in note(variants(load(roots[:1])))


def test_places_of_a_run_that_scales_by_itself_are_those_of_the_actors_that_there_were(
    tmp_path: Path,
) -> None:
    """One actor with all its 64 places in use from 1 to 5 s, two with 64 of 128 from then to the
    last step after 9 s.
    """
    scaling = JOB.replace(
        "seed: 11", "seed: 11, actors: {maxReplicas: 8}, autoscale: {enabled: true}"
    )
    root = make_run(tmp_path / "run", [0.5] * 9, job=scaling)
    first = 1010.5  # the first token's time
    reported = [
        (first, "actor-0", 64.0, 64.0),
        (first + 4, "actor-0", 32.0, 64.0),
        (first + 4, "actor-1", 32.0, 64.0),
    ]
    with (root / "metrics.jsonl").open("a") as file:
        for time, actor, running, limit in reported:
            file.write(
                Record(
                    "actor", actor, time, -1, {"requests_running": running, "requests_limit": limit}
                ).to_json()
                + "\n"
            )
    (run,) = load([root])
    end = run.history.steps[-1].t
    assert run.places_in_use == pytest.approx(64 * end / (64 * 4 + 128 * (end - 4)))


def test_settings_that_differ_are_told_first_and_other_tasks_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = JOB.replace('"}, task', '", adapter: {rank: 16}}, task').replace("Sums", "Products")
    other = lora.replace("seed: 11", "seed: 12, algorithm: {optimizer: {learningRate: 0.001}}")
    roots = [
        make_run(tmp_path / "sums", [0.5] * 6),
        make_run(tmp_path / "products", [0.5] * 6, job=other),
    ]
    assert main(["compare", *map(str, roots), "--output", str(tmp_path / "c.html")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("WARNING: the runs have different tasks (task.path or task.args)")
    assert said[1].split() == ["setting", "sums", "products"]
    rows = {line.split()[0]: line.split()[1:] for line in said[2 : said.index("")]}
    assert rows["task.path"] == ["tasks:Sums", "tasks:Products"]
    assert rows["model.adapter.rank"] == ["-", "16"]
    assert rows["algorithm.optimizer.learningRate"] == ["1e-06", "0.001"]
    assert not {"seed", "algorithm.loss", "model.uri"} & rows.keys()
    page = (tmp_path / "c.html").read_text()
    assert page.index("WARNING: the runs have different tasks") < page.index("<h2>Numbers")
    assert "<td>task.path</td><td>tasks:Sums</td><td>tasks:Products</td>" in page


def test_runs_of_one_task_are_not_warned_of_and_equal_ones_have_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bigger = JOB.replace("seed: 11", "seed: 11, algorithm: {groupsPerStep: 7}")
    one, same, big = (
        make_run(tmp_path / name, [0.5] * 6, job=job)
        for name, job in zip("abc", (JOB, JOB, bigger), strict=True)
    )
    assert differences(variants(load([one, same]))) == []
    groups = str(load([one])[0].job.spec.algorithm.groups_per_step)
    assert differences(variants(load([one, big]))) == [["algorithm.groupsPerStep", groups, "7"]]
    assert main(["compare", str(one), str(big), "--output", str(tmp_path / "c.html")]) == 0
    assert "WARNING" not in capsys.readouterr().out + (tmp_path / "c.html").read_text()


def test_folder_that_is_given_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "one", [0.9] * 5)
    two = make_run(tmp_path / "two", [0.9] * 5)
    (tmp_path / "link").symlink_to(one)
    assert main(["compare", str(one), str(two), str(tmp_path / "link")]) == 2
    assert f"{one}: this folder is given twice" in capsys.readouterr().err


def test_one_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(make_run(tmp_path / "run", [0.1]))]) == 2
    assert "nothing to be compared with" in capsys.readouterr().err


def seeds_of(tmp_path: Path, rewards: dict[int, float]) -> list[Compared]:
    """Runs of 20 steps with a constant reward each, by seed."""
    roots = [
        make_run(tmp_path / f"seed-{seed}" / "sums", [reward] * 20, job=with_seed(seed))
        for seed, reward in rewards.items()
    ]
    return load(roots)


def test_runs_that_differ_in_their_seed_stand_together(tmp_path: Path) -> None:
    (together,) = variants(seeds_of(tmp_path, {1: 0.6, 2: 0.8}))
    assert together.label == "sums"
    assert row([together], "seeds") == ["1 2"]
    assert row([together], "reward last") == ["0.7 (0.6 to 0.8)"]
    assert row([together], "trajectories to 0.7", (0.7,)) == ["20, 1 of 2 runs"]
    band, line = together.lines(
        3, lambda run: ([step.t for step in run.history.steps], run.rewards)
    )
    assert (band.style, line.style) == ("band", "line")
    assert band.floor is not None
    assert (band.floor[0], line.ys[0], band.ys[0]) == pytest.approx((0.6, 0.7, 0.8))


def test_runs_of_other_settings_or_of_the_same_seed_stand_apart(tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", [0.5] * 6, job=with_seed(2, steps=7))
    same, again = (
        make_run(tmp_path / name, [0.5] * 6, job=with_seed(1)) for name in ("same", "again")
    )
    assert [each.label for each in variants(load([other, same, again]))] == [
        "other",
        "same",
        "again",
    ]


def test_runs_of_one_name_are_told_apart_where_the_name_is_not_theirs_alone(tmp_path: Path) -> None:
    roots = [
        make_run(tmp_path / f"{k}" / "sums", [0.5] * 6, job=with_seed(k % 2, steps=7 + k // 2))
        for k in range(4)
    ]
    assert [each.label for each in variants(load(roots))] == [
        f"{roots[0]} and 1 more",
        f"{roots[2]} and 1 more",
    ]


def test_curve_over_runs_lies_where_all_of_them_are() -> None:
    curve = curve_of([([0, 10], [0.0, 1.0]), ([2, 4, 6], [1.0, 0.5, 0.0])])
    assert (curve.xs[0], curve.xs[-1]) == (2, 6)
    assert (curve.mean[0], curve.low[0], curve.high[0]) == pytest.approx((0.6, 0.2, 1.0))
    assert (curve.mean[-1], curve.low[-1], curve.high[-1]) == pytest.approx((0.3, 0.0, 0.6))
    assert curve_of([([0, 1], [0.0, 0.0]), ([2, 3], [0.0, 0.0])]).xs == []
    assert curve_of([([], []), ([2, 3], [0.0, 0.0])]).xs == []


def test_cells_of_one_run_and_of_several() -> None:
    assert cell([0.8], "{:.1f}".format) == cell([0.81, 0.79], "{:.1f}".format) == "0.8"
    assert cell([0.7, None, 0.9], "{:.1f}".format) == "0.8 (0.7 to 0.9)"
    assert cell([None], "{:.1f}".format) == "-"
