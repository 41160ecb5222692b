"""Files of every kind, the order of problems over epochs, filter and curriculum."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipelinerl_actor.dataset import DatasetRow, DataSettings, Problems, text_of
from pipelinerl_common.errors import SettingsError

ROWS = [{"text": f"problem {n}", "level": n} for n in range(1, 9)]


def load(seed: int = 0, **data: Any) -> Problems[str]:
    return Problems.load(DataSettings.model_validate(data), seed, lambda row: text_of(row, "text"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def epochs(problems: Problems[str], num: int) -> list[list[str]]:
    return [
        [problems[epoch * len(problems) + i] for i in range(len(problems))] for epoch in range(num)
    ]


def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path) -> None:
    import datasets

    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved))
    splits = tmp_path / "splits"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(splits))
    write_parquet(tmp_path / "hub/data/train-00000-of-00002.parquet", ROWS[:5])
    write_parquet(tmp_path / "hub/data/train-00001-of-00002.parquet", ROWS[5:])
    write_parquet(tmp_path / "hub/data/test-00000-of-00001.parquet", ROWS[:1])
    paths = [
        write_jsonl(tmp_path / "rows.jsonl", ROWS),
        write_parquet(tmp_path / "rows.parquet", ROWS),
        write_jsonl(tmp_path / "plain/train.jsonl", ROWS).parent,
        tmp_path / "hub",
        saved,
        splits,
    ]
    first, *others = [epochs(load(path=str(path)), 2) for path in paths]
    assert all(other == first for other in others)
    assert len(load(path=str(tmp_path / "hub"), split="test")) == 1


def test_every_epoch_holds_every_problem_once_in_an_order_of_its_own_that_the_seed_decides(
    tmp_path: Path,
) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    counted = [Counter(epoch) for epoch in epochs(load(path=path), 4)]
    assert counted == [Counter(row["text"] for row in ROWS)] * 4
    orders = epochs(load(path=path), 4)
    assert len({tuple(order) for order in orders}) == 4
    assert epochs(load(path=path), 4) == orders
    assert epochs(load(seed=1, path=path), 4) != orders


def test_the_filter_keeps_its_bounds(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    kept = load(path=path, difficulty={"field": "level", "min": 3, "max": 5})
    assert sorted(kept[i] for i in range(len(kept))) == ["problem 3", "problem 4", "problem 5"]


def test_a_curriculum_goes_from_easy_to_hard_and_is_shuffled_afterwards(tmp_path: Path) -> None:
    rows = [{"text": f"{level} {n}", "level": level} for level in (3, 1, 2) for n in range(10)]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    first, second, third = epochs(
        load(path=path, difficulty={"field": "level", "curriculumEpochs": 2}), 3
    )
    for epoch in (first, second):
        assert [text[0] for text in epoch] == ["1"] * 10 + ["2"] * 10 + ["3"] * 10
    assert first != second
    assert [text[0] for text in third] != sorted(text[0] for text in third)
    assert Counter(third) == Counter(first)


@pytest.mark.parametrize(
    ("rows", "difficulty", "complaint"),
    [
        (
            [{"text": "a", "level": 3}],
            {"field": "rank"},
            r"rows\.jsonl:1: no field 'rank'; it has 'text', 'level'",
        ),
        (
            [{"text": "a", "level": "hard"}],
            {"field": "level"},
            r"rows\.jsonl:1: 'level' is 'hard', not a finite number",
        ),
        (
            [{"text": "a", "level": True}],
            {"field": "level"},
            "'level' is True, not a finite number",
        ),
        (
            [{"text": "a", "level": 3}],
            {"field": "level", "min": 4},
            "none of the 1 rows is between min=4.0 .* from 3 to 3",
        ),
    ],
)
def test_difficulties_that_do_not_fit_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], difficulty: dict[str, Any], complaint: str
) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    with pytest.raises(SettingsError, match=complaint):
        load(path=path, difficulty=difficulty)


def test_bounds_that_no_row_can_pass_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"difficulty\.min=2\.0 is above difficulty\.max=1\.0"
    ):
        DataSettings.model_validate(
            {"path": "x", "difficulty": {"field": "level", "min": 2, "max": 1}}
        )


def test_a_path_alone_is_short_for_settings_with_that_path() -> None:
    assert DataSettings.model_validate("rows.jsonl") == DataSettings(path="rows.jsonl")


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(SettingsError, match=r"there is no file or folder .*none\.jsonl"):
        load(path=str(tmp_path / "none.jsonl"))
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(
        SettingsError, match=r"rows\.csv has no known suffix; use \.jsonl, \.parquet or a folder"
    ):
        load(path=str(tmp_path / "rows.csv"))
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(SettingsError, match=r"broken\.parquet cannot be read"):
        load(path=str(tmp_path / "broken.parquet"))
    write_jsonl(tmp_path / "folder/test.jsonl", ROWS)
    with pytest.raises(SettingsError, match=r"folder holds no file of split 'train'"):
        load(path=str(tmp_path / "folder"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(
        str(tmp_path / "splits")
    )
    with pytest.raises(SettingsError, match=r"split='train': .* has the splits test"):
        load(path=str(tmp_path / "splits"))


def test_rows_are_parsed_before_the_first_step(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"text": ""}]))
    with pytest.raises(SettingsError, match=r"rows\.jsonl:9: 'text' is '', not a text"):
        load(path=path)


def test_a_row_says_where_it_stands() -> None:
    with pytest.raises(SettingsError, match=r"train\.jsonl:3: no field 'b'; it has 'a'"):
        text_of(DatasetRow("train.jsonl:3", {"a": 1}), "b")
