"""Wiring from flags, signals and exit status (in a real process), loops side by side, log lines."""

import argparse
import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_common.service import parse_wiring, run_service, run_until_first
from pipelinerl_common.telemetry import configure_logging, fields


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_flags_become_the_wiring(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    wiring = parse_wiring(
        "actor",
        [
            "--job",
            "job.yaml",
            "--generator",
            "http://a:1",
            "--generator",
            "http://b:2",
            "--token-file",
            str(token_file),
        ],
        listen="0.0.0.0:8000",
    )
    assert wiring.generators == ("http://a:1", "http://b:2")
    assert wiring.references == ()
    assert wiring.listen == "0.0.0.0:8000"
    assert wiring.name == "actor-0"
    assert wiring.token == "secret"


def test_no_token_file_is_no_token() -> None:
    assert parse_wiring("actor", ["--job", "job.yaml"]).token is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("  \n", "is empty"), (b"\xff", "cannot be read")],
)
def test_a_useless_token_file_is_named(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    wiring = parse_wiring("actor", ["--job", "job.yaml", "--token-file", str(path)])
    with pytest.raises(SettingsError, match=message):
        _ = wiring.token


def test_wrong_flags_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_wiring("actor", ["--jobb", "job.yaml"])
    assert caught.value.code == 2
    assert "--job" in capsys.readouterr().err


def test_flags_of_one_service_are_described_and_accepted_with_those_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--rank", type=int, default=0, help="number of this process")
    argv = ["--job", "job.yaml", "--rank", "3", "--name", "trainer-3"]
    assert parse_wiring("trainer", argv, own).name == "trainer-3"
    assert own.parse_known_args(argv)[0].rank == 3
    with pytest.raises(SystemExit) as caught:
        parse_wiring("trainer", ["--help"], own)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    assert "number of this process" in shown
    assert "the job file" in shown


@pytest.mark.parametrize("wrong", [["--rank", "x"], ["--ran", "3"], ["--nam", "a"]])
def test_wrong_and_abbreviated_flags_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--rank", type=int, default=0)
    with pytest.raises(SystemExit) as caught:
        parse_wiring("trainer", ["--job", "job.yaml", *wrong], own)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_usage_names_the_command_that_started_the_service() -> None:
    """There are no subcommands of `pipelinerl` for services."""
    module = "pipelinerl_common.sinks"
    command = [sys.executable, "-m", module, "--jobb"]
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"usage: python -m {module} ")


def _service(body: str) -> subprocess.Popen[str]:
    program = f"""
import asyncio, sys
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import run_service
async def main(stop):
    {body}
sys.exit(run_service(main, name="actor-0", log_level="info"))
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_cleanly(number: signal.Signals) -> None:
    process = _service("print('up', flush=True); await stop.wait(); print('drained', flush=True)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "drained\n"
    assert number.name in errors


def test_a_signal_ends_a_service_that_is_starting() -> None:
    """No code heeds `stop` yet: a connection is waited for, an engine warms up."""
    process = _service("""
    try:
        print('up', flush=True)
        await asyncio.sleep(1000)
        await stop.wait()
    finally:
        print('cleaned', flush=True)
""")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output == "cleaned\n"
    assert "stopped while it was starting" in errors


def test_a_service_that_has_looked_at_its_stop_ends_by_itself() -> None:
    process = _service("""
    while not stop.is_set():
        print('up', flush=True)
        await asyncio.sleep(0.2)
    print('drained', flush=True)
""")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.endswith("drained\n")


def test_a_cancellation_that_no_signal_asked_for_is_a_crash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run_service(lambda stop: _raise(asyncio.CancelledError()), name="actor-0", log_level="info")
        == 1
    )
    assert "crashed error=FatalError: cancelled, though by no signal" in capsys.readouterr().err


def test_a_second_signal_cancels() -> None:
    process = _service(
        "print('up', flush=True); await stop.wait(); print('draining', flush=True); await "
        "asyncio.sleep(1000)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130


async def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingsError("eta=-1"), 2),
        (ExceptionGroup("loops", [SettingsError("eta=-1")]), 2),
        (ExceptionGroup("loops", [SettingsError("eta=-1"), KeyError("x")]), 1),
        (FatalError("half applied"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_exit_status_and_one_line_per_error(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_service(lambda stop: _raise(error), name="actor-0", log_level="info") == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (len(error.exceptions) if isinstance(error, ExceptionGroup) else 1)
    assert all(
        re.match(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR actor-0 crashed error=\w+: ", line)
        for line in lines
    )


def test_tracebacks_at_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_service(lambda stop: _raise(ZeroDivisionError("x")), name="actor-0", log_level="debug")
        == 1
    )
    assert "Traceback" in capsys.readouterr().err


def test_a_message_of_several_lines_stays_one_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer-0", "info")
    logging.getLogger("x").info("two faults\n  a\n  b")
    assert capsys.readouterr().err.endswith("INFO trainer-0 two faults |   a |   b\n")


def test_fields() -> None:
    assert fields(step=3, reward=0.412345, group="0-1") == "step=3 reward=0.4123 group=0-1"


async def _forever(cancelled: list[str], name: str = "forever") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.append(name)


async def _value(value: int) -> int:
    return value


async def test_the_clock_ends_the_others() -> None:
    cancelled: list[str] = []
    assert await run_until_first(_value(3), _forever(cancelled, "a"), _forever(cancelled, "b")) == 3
    assert cancelled == ["a", "b"]


async def test_another_task_that_returns_is_a_crash() -> None:
    cancelled: list[str] = []
    with pytest.raises(FatalError, match="_value ended"):
        await run_until_first(_forever(cancelled), _value(1))
    assert cancelled == ["forever"]


async def test_another_task_that_raises_is_a_crash() -> None:
    cancelled: list[str] = []
    with pytest.raises(ZeroDivisionError):
        await run_until_first(_forever(cancelled), _raise(ZeroDivisionError()))
    assert cancelled == ["forever"]


async def test_cancelling_the_call_cancels_all() -> None:
    cancelled: list[str] = []
    task = asyncio.ensure_future(
        run_until_first(_forever(cancelled, "clock"), _forever(cancelled, "other"))
    )
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["clock", "other"]


async def test_a_failing_shutdown_is_logged_and_hides_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("late")

    async def short() -> int:
        await asyncio.sleep(0)  # the other one runs up to its wait
        return 5

    assert await run_until_first(short(), fails_late()) == 5
    assert "failed while it was shut down" in caplog.text
