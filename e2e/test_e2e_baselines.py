"""The baselines experiment on runs made up for it, with numbers worked out by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments.baseline import targets
from experiments.baseline.cores import CoreUse, between, measure
from experiments.baseline.numbers import Overlap, Ratio, paired_ratio
from experiments.baseline.report import Report
from experiments.baseline.runs import (
    SEARCH_SEED,
    Experiment,
    Plan,
    Setting,
    best_conventional,
    place,
    rotated,
)
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import load_job
from up_run import ARITHMETIC

PLAN = Plan(str(ARITHMETIC), seeds=2, conventional=(1, 4, 8), steps=20, goal=0.8, cores=2)
SECONDS = {None: 1.0, 1: 3.0, 4: 2.0, 8: 1.5}
"""Seconds of a step, by G."""
ESS = {None: 0.97, 1: 1.0, 4: 0.96, 8: 0.7}
WAIT_SHARE = 0.6


def make_up(plan: Plan, root: Path, seed: int, setting: Setting) -> None:
    """A run in place of a real one: the mean of five rewards is over 0.8 from step 11 on; with G =
    8 they fall again.
    """
    root.mkdir(parents=True)
    job = load_job(Path(plan.job), [f"seed={seed}", *setting.overrides])
    (root / "job.yaml").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (root / "summary.json").write_text('{"status": "finished"}')
    seconds = SECONDS[setting.num_steps] * setting.threads + seed % SEARCH_SEED / 10
    records = [
        record("up", 1000, -1, session_started=1),
        record("actor", 1010, -1, tokens_generated_total=0),
        record("actor", 1011, -1, tokens_generated_total=9),
    ]
    for step in range(1, plan.steps + 1):
        reward = 0.1 if setting.num_steps == 8 and step > 15 else min(0.9, step / 10)
        records.append(
            record(
                "trainer",
                1010 + step * seconds,
                step,
                reward_mean=reward,
                num_sequences=4,
                num_trained_tokens=50,
                step_seconds=seconds,
                wait_seconds=WAIT_SHARE * seconds,
                ess=ESS[setting.num_steps],
                lag_mean=0.5,
                lag_max=2,
            )
        )
    (root / "metrics.jsonl").write_text("\n".join(records) + "\n")
    uses = [
        CoreUse(1000 + t, {"trainer": 0.5 * t, "generator": t, "up": 0.0}, 1.55 * t)
        for t in range(60)
    ]
    root.with_name(f"{root.name}.cores.jsonl").write_text(
        "".join(use.to_json() + "\n" for use in uses)
    )


def record(role: str, time: float, step: int, **values: float) -> str:
    return json.dumps(
        {"role": role, "instance": f"{role}-0", "time": time, "step": step, "values": values}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Experiment(tmp_path, PLAN, lambda text: None, make_up).run()
    return tmp_path


def test_search_takes_the_fastest_that_does_not_collapse_and_every_seed_runs_all_settings(
    folder: Path,
) -> None:
    """G = 8 reaches the goal first and collapses; two threads make each step twice as long here."""
    assert best_conventional(folder, PLAN) == Setting(4, threads=1)
    runs = sorted(str(path.parent.relative_to(folder)) for path in folder.glob("*/*/metrics.jsonl"))
    assert runs == [
        "search/conventional-1",
        "search/conventional-4",
        "search/conventional-4-threads-2",
        "search/conventional-8",
        *(
            f"seed-{seed}/{name}"
            for seed in (1, 2)
            for name in ("conventional-1", "conventional-4", "in-flight")
        ),
    ]


def test_all_cores_for_each_process_are_taken_where_they_are_faster(tmp_path: Path) -> None:
    def carry_out(plan: Plan, root: Path, seed: int, setting: Setting) -> None:
        make_up(
            plan,
            root,
            seed,
            replace(setting, num_steps=None, threads=1) if setting.threads == 2 else setting,
        )

    Experiment(tmp_path, PLAN, lambda text: None, carry_out).run()
    assert best_conventional(tmp_path, PLAN) == Setting(4, threads=2)
    assert place(tmp_path, 1, Setting(1, threads=2)).is_dir(), (
        "the strictly on-policy runs take the same"
    )


def test_finished_runs_are_kept_and_unfinished_ones_made_again(folder: Path) -> None:
    broken = place(folder, 2, PLAN.in_flight)
    (broken / "summary.json").unlink()
    made: list[tuple[int, str]] = []
    said: list[str] = []

    def carry_out(plan: Plan, root: Path, seed: int, setting: Setting) -> None:
        made.append((seed, setting.name))
        (root / "summary.json").write_text('{"status": "finished"}')

    Experiment(folder, PLAN, said.append, carry_out).run()
    assert made == [(2, "in-flight")]
    assert sum("is there already" in line for line in said) == 9
    (line,) = [line for line in said if "seed-2/in-flight:" in line]
    assert (
        "20 steps in 24 s of training, reward 0.8 after 13 s, at the end 0.900" in line
    )  # 11 steps of 1.2 s


def test_another_experiment_is_not_mixed_into_a_folder(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"steps=20.*not of.*steps=30.*use a new folder"):
        Experiment(folder, replace(PLAN, steps=30), print, make_up).run()


def test_search_in_which_nothing_comes_to_the_goal_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"--conventional 1,4,8: none comes to a reward of 0\.95 in 20 steps"
    ):
        Experiment(tmp_path, replace(PLAN, goal=0.95), lambda text: None, make_up).run()


def test_report_tells_targets_ratios_and_what_bounds_them(folder: Path) -> None:
    report = Report.of(folder)
    document = json.loads(report.json())
    ratio = document["ratios"]["conventional-4"]["time to goal"]
    # 11 steps of 2.1 and 2.2 s against 11 of 1.1 and 1.2 s
    assert ratio["value"] == pytest.approx(4.3 / 2.3)
    assert (ratio["low"], ratio["high"], ratio["num_pairs"]) == (
        pytest.approx(2.2 / 1.2),
        pytest.approx(2.1 / 1.1),
        2,
    )
    assert [target["is_met"] for target in document["targets"]] == [True, True, True]
    bound = document["overlap"]
    assert (bound["generation_s"], bound["training_s"]) == (
        pytest.approx(0.6 * 2.15),
        pytest.approx(0.4 * 2.15),
    )
    assert bound["core_seconds"] == pytest.approx(1.5 * 1.15)
    assert bound["speed_up"] == pytest.approx(1 / 0.6)
    text = report.markdown()
    assert (
        "| time to the goal, conventional / in-flight | at least 1.5 | 1.87 (1.83 to 1.91, 2 "
        "seeds) | met |" in text
    )
    assert (
        "| trajectories to the goal, in-flight / conventional | at most 1.1 | 1.00 (1.00 to 1.00, "
        "2 seeds) | met |" in text
    )
    assert "| cores in use, generator | 1.00 | 1.00 | 1.00 |" in text
    assert "| conventional-8 | 16.5 | 44 | 0.100 | 0.7000 | no | 12.0 |" in text
    assert "| conventional-4-threads-2 | - | - | 0.650 | 0.9600 | - | 32.0 |" in text, (
        "a trial of 8 steps, of 4 s each"
    )
    assert "Disturbed" not in text, "0.05 cores of others are not worth a word"


def test_report_draws_each_setting_with_its_band(folder: Path) -> None:
    pictures = dict(Report.of(folder).pictures())
    assert list(pictures) == [
        "reward-over-time",
        "reward-over-trajectories",
        "reward-over-tokens",
        "lag",
        "ess",
        "tokens-per-second",
    ]
    drawn = [
        element.attrib.get("class")
        for element in ElementTree.fromstring(pictures["reward-over-time"]).iter()
    ]
    assert [drawn.count(f"band c{colour}") for colour in range(3)] == [1, 1, 1]


def test_report_of_an_unfinished_search_says_what_is_missing(folder: Path) -> None:
    (folder / "search" / "conventional-4" / "summary.json").unlink()
    with pytest.raises(SettingsError, match=r"search has not finished \(conventional-4\)"):
        Report.of(folder)
    with pytest.raises(SettingsError, match="no experiment in it"):
        Report.of(folder / "seed-1")


def test_paired_ratio_by_hand() -> None:
    """The resampled pairs are the first twice, the second twice, or both: ratios 2, 1 and 1.2."""
    ratio = paired_ratio([2.0, 4.0], [1.0, 4.0])
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.num_pairs) == pytest.approx(
        (1.2, 1.0, 2.0, 2)
    )
    assert paired_ratio([3.0, None, 5.0], [2.0, 1.0, None]) == Ratio(1.5, 1.5, 1.5, 1)
    assert paired_ratio([None], [1.0]) is None


def test_overlap_is_bounded_by_the_longer_phase_and_by_the_cores() -> None:
    even = Overlap(generation_s=0.5, training_s=0.5, core_seconds=1.0, num_cores=2)
    assert even.speed_up_of_phases == even.speed_up == 2
    crowded = replace(even, core_seconds=1.6)
    assert (crowded.speed_up_of_phases, crowded.speed_up) == pytest.approx((2.0, 1.25))
    uneven = replace(even, training_s=0.1)
    assert uneven.speed_up == pytest.approx(1.2)


def test_targets_say_what_was_measured_and_whether_it_is_enough() -> None:
    assert not targets.speed_up(Ratio(1.49, 1.4, 1.6, 5)).is_met
    assert targets.samples(Ratio(0.5, 0.4, 0.6, 5)).is_met, "fewer samples are no fault"
    assert not targets.samples(Ratio(1.11, 1.0, 1.2, 5)).is_met
    assert targets.speed_up(None).measured == "no seed in which both come to the goal"
    assert not targets.ess([], [], 4).is_met


def test_ess_is_measured_by_small_g_alone(folder: Path) -> None:
    report = Report.of(folder)
    mine = report.in_flight.numbers
    theirs = [(arm.setting.num_steps or 0, run) for arm in report.searched for run in arm.numbers]
    assert (
        targets.ess(mine, theirs, 1).wanted
        == "at least 0.9600, the least of conventional G up to 4 (to 1.0000)"
    )
    assert targets.ess(mine, theirs, 8).wanted.startswith("at least 0.7000")
    assert not targets.ess([replace(mine[0], ess_mean=0.95)], theirs, 4).is_met


def test_core_use_between_two_moments_by_hand() -> None:
    uses = [
        CoreUse(100, {"trainer": 5.0}, 50.0),
        CoreUse(104, {"trainer": 7.0, "generator": 4.0}, 58.0),
    ]
    used = between(uses)
    assert used is not None
    assert (used.by_role, used.others) == ({"trainer": 0.5, "generator": 1.0}, 0.5)
    assert between(uses[:1]) is None


def test_core_use_of_a_process_that_works_is_told_by_its_name() -> None:
    program = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    )
    command = [sys.executable, "-c", program, "--name", "generator-0-0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        use = measure(os.getpid(), now=5.0)
        child.communicate("\n")
    assert use.by_role["generator"] >= 0.25
    assert use.machine >= use.by_role["generator"]


def test_every_setting_comes_first_for_some_seed() -> None:
    settings = [Setting(None, 1), Setting(4, 1), Setting(1, 1)]
    assert {rotated(settings, seed)[0] for seed in (1, 2, 3)} == set(settings)
    assert all(set(rotated(settings, seed)) == set(settings) for seed in range(5))


def test_conventional_runs_differ_in_their_staleness_policy_alone() -> None:
    (override,) = Setting(4, 1).overrides
    spec = load_job(ARITHMETIC).spec.model_dump()
    conventional = load_job(ARITHMETIC, [override]).spec.model_dump()
    assert {name for name in spec if spec[name] != conventional[name]} == {"staleness"}
    assert conventional["staleness"] == {"policy": "conventional", "stepsPerGeneration": 4}
