"""A file is replaced as a whole, or stays as it was."""

from pathlib import Path

import pytest

from pipelinerl_common.files import write_whole


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
