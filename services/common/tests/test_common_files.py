"""A file is replaced as a whole, or stays as it was; torn last lines are cut."""

from pathlib import Path

import pytest

from pipelinerl_common.files import cut_torn_line, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for text in ("{}\n", "größer\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"one\ntw", b"one\n"),
        (b"torn", b""),
        (b"one\n" + b"x" * 200_000, b"one\n"),
    ],
)
def test_only_an_unfinished_last_line_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after


def test_a_file_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []
