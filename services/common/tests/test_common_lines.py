"""Torn last lines are cut, whole ones are kept."""

from pathlib import Path

import pytest

from pipelinerl_common.files import cut_torn_line


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
