from pathlib import Path

import pytest

from pipelinerl_common.text import (
    close_matches,
    counted,
    did_you_mean,
    did_you_mean_folder,
    markdown_table,
)


def test_a_noun_goes_with_its_number() -> None:
    assert [counted(number, "restart") for number in (0, 1, 2)] == [
        "0 restarts",
        "1 restart",
        "2 restarts",
    ]
    assert counted(1.0, "reply", "replies") == "1 reply"
    assert counted(3, "reply", "replies") == "3 replies"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learningrate", ["learningRate"]),
        ("lern", ["learningRate"]),
        ("wieghtDecay", ["weightDecay"]),
        ("warmup_step", ["warmupSteps"]),
        ("xyz", []),
        ("we", []),  # too short a start
    ],
)
def test_a_misspelt_or_shortened_name_is_recognised(word: str, meant: list[str]) -> None:
    assert close_matches(word, ["learningRate", "weightDecay", "warmupSteps", "eps"]) == meant


def test_the_nearest_comes_first_and_a_whole_name_before_a_beginning() -> None:
    assert close_matches("step", ["stepsPerGeneration", "steps"], most=2) == [
        "steps",
        "stepsPerGeneration",
    ]
    assert (
        did_you_mean("step", ["stepsPerGeneration", "steps"], most=2)
        == "; did you mean 'steps' or 'stepsPerGeneration'?"
    )
    assert did_you_mean("nothing", ["steps"]) == ""


def test_a_folder_of_nearly_the_name_is_found_beside_it_and_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "my-first").mkdir(parents=True)
    (tmp_path / "runs" / "my_first.yaml").write_text("no folder")
    assert did_you_mean_folder(Path("runs/my_first")) == "; did you mean runs/my-first?"
    assert did_you_mean_folder(Path("my_first")) == "; did you mean runs/my-first?"
    assert did_you_mean_folder(Path("other/place")) == ""
    assert did_you_mean_folder(Path("runs/my-first")) == "", "it is there"


def test_a_table_in_markdown() -> None:
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
