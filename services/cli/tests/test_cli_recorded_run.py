"""The commands that read what a live run has recorded: `simulate --from-run` and `replay`."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from pipelinerl_cli.__main__ import main

RECORDED = Path(__file__).parents[2] / "planner/tests/recorded_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes(gzip.decompress((RECORDED / f"{name}.gz").read_bytes()))
    shutil.copy(RECORDED / "job.yaml", tmp_path)
    return tmp_path


def test_the_command_prints_a_table_or_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--from-run", str(folder)]) == 0
    table = capsys.readouterr().out
    assert "measured" in table
    assert "KV use, mean" in table
    assert main(["simulate", "--from-run", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], document["num_steps"]) == ("areal", 24)
    duration = document["comparisons"][0]
    assert duration["difference"] == pytest.approx(duration["simulated"] / duration["measured"] - 1)
    assert document["cost_model"]["max_sequences"] == 32


@pytest.mark.parametrize("command", [["simulate", "--from-run"], ["replay"]])
def test_a_folder_without_a_recording_is_refused_with_the_commands_name(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pipelinerl {command[0]}: {tmp_path} has no events.jsonl: give ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"\xff", 2),
        (b"[" * 100_000, 2),
        (b"[1, 2]", 2),
        (b'[1, "observe", [], []]', 1),
        (b'[1, "policy", [], null]', 1),
    ],
)
def test_a_replay_names_a_broken_line(
    line: bytes, status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join([*lines[:20], line + b"\n", *lines[20:]]))
    assert main(["replay", str(folder)]) == status
    shown = capsys.readouterr()
    assert "events.jsonl:21: " in shown.out + shown.err
