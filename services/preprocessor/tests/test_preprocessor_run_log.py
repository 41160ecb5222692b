"""The event log of a live run and its replay, and the log of trained groups."""

import json
import re
from pathlib import Path

import pytest
from preprocessor_harness import PreprocessorHarness, harness

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl_cli.__main__ import main
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import Group
from pipelinerl_preprocessor.run_log import EventLog, TrainedLog
from pipelinerl_staleness.recording import NOTES


def events_of(output: Path) -> list[list[object]]:
    return [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]


async def live_run(preprocessor: PreprocessorHarness) -> None:
    """Three steps, a group that is cancelled or dropped for its age, a group that fails, and a
    crash between steps.
    """
    await preprocessor.begin()
    late = (await preprocessor.lease(1)).leases
    for step in range(3):
        await preprocessor.roll_out(2, version=step)
        pulled = await preprocessor.pull_grown(step)
        await preprocessor.commit(step, pulled.plan.group_ids)
        assert await preprocessor.may_publish(step + 1, wait_s=5)
        await preprocessor.mark_published(step + 1)
        if step == 1:
            await preprocessor.crash()
            await preprocessor.report(late[0].lease_id, pb.GROUP_OUTCOME_FAILED, reason="broken")


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "areal", "eta": 3},
        {"policy": "roll", "rho": 1},
        {"policy": "layered", "eta": 3},
        {"policy": "prime_rl", "eta": 2, "initialInflight": 6},
        {"policy": "slack", "eta": 3, "cIdle": 4, "cBusy": 4},
    ],
    ids=lambda policy: str(policy["policy"]),
)
async def test_a_recorded_run_replays_to_the_same_decisions(
    tmp_path: Path, policy: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    async with harness(tmp_path, staleness=policy) as preprocessor:
        await live_run(preprocessor)
        status = main(["replay", str(preprocessor.output)])  # while it runs
    methods = [str(event[1]) for event in events_of(preprocessor.output)]
    assert methods.count("policy") == 2
    assert methods.count("step_done") == 3
    assert {
        "admitted",
        "first_token",
        "last_token",
        "trajectory_finished",
        "published",
        "may_admit",
    } <= set(methods)
    assert main(["replay", str(preprocessor.output)]) == status == 0
    counted = re.fullmatch(
        r"(?s).*\n(\d+) events fed to a fresh policy, (\d+) decisions compared: all agree\n",
        capsys.readouterr().out,
    )
    assert counted is not None
    assert sum(map(int, counted.groups())) == len(
        [name for name in methods if name not in ("policy", *NOTES)]
    )


async def test_a_tampered_log_is_told_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with harness(tmp_path) as preprocessor:
        await live_run(preprocessor)
    path = preprocessor.output / "events.jsonl"
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if '"take"' in line and '["0-' in line)
    seconds, method, arguments, (groups, dropped, reason) = json.loads(lines[number])
    lines[number] = json.dumps(
        [seconds, method, arguments, [[*groups[:-1], "0-99"], dropped, reason]]
    )
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(preprocessor.output)]) == 1
    shown = capsys.readouterr().out
    assert "compared, which agree; the next one differs" in shown
    assert f"events.jsonl:{number + 1}: take" in shown
    lines[number] = "{"
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(preprocessor.output)]) == 2
    assert f"events.jsonl:{number + 1}: not an event" in capsys.readouterr().err


def test_a_folder_without_events_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "events.jsonl" in capsys.readouterr().err


def test_a_line_that_a_crash_left_unfinished_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('[1.0,"finished",["0-1"],null]\n[1.0,"fini' + "x" * 200_000)
    log = EventLog(path)
    log.write("lost", ["0-1"], None)
    log.close()
    assert [event[1:] for event in events_of(tmp_path)] == [
        ["finished", ["0-1"], None],
        ["lost", ["0-1"], None],
    ]


def test_a_full_log_ends_and_the_next_start_begins_another(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for start in range(2):
        log = EventLog(path, max_bytes=300)
        for number in range(100):
            log.write("finished", [f"{start}-{number}"], None)
        log.close()
        assert 300 <= path.stat().st_size < 400
    older = (tmp_path / "events.1.jsonl").read_text()
    assert '["0-0"]' in older
    assert '["1-0"]' in path.read_text()


def test_a_log_that_cannot_be_written_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "events.jsonl")
    log.write("finished", ["0-1"], None)
    log.close()


def test_trained_lines_are_cut_at_a_rewind(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "new" / "trained.jsonl")
    log.rewind(0)
    for step in range(3):
        log.append(step, 0, [Group(GroupId(f"0-{step}"), step, 10 + step)])
    with log.path.open("a") as file:
        file.write('{"step": 1, "gro')
    log.rewind(2)
    log.append(2, 1, [Group(GroupId("1-0"), 0, 12)])
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [
        (line["step"], line["incarnation"], line["groups"][0]["prompt_index"]) for line in lines
    ] == [(0, 0, 10), (1, 0, 11), (2, 1, 12)]


def test_a_line_that_a_full_disk_cut_off_costs_no_other(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "trained.jsonl")
    log.append(0, 0, [])
    with log.path.open("a") as file:
        file.write('{"step": 1, "gro')
    log.append(2, 0, [])
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0, 2]
