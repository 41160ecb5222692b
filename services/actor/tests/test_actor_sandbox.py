"""What a program in the sandbox can do, and what it cannot."""

import shutil
import textwrap
import time
from pathlib import Path

import pytest

from pipelinerl_actor.sandbox import Sandbox, SandboxEnding, SandboxLimits
from pipelinerl_common.errors import SettingsError

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(
        SandboxLimits(seconds=20, memory_bytes=256 << 20, processes=8, output_bytes=10_000)
    )


def test_a_program_reads_stdin_and_answers_with_output_and_status(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)\nsys.exit(3)", "hello\n"
    )
    assert (result.ending, result.status, result.stdout, result.stderr) == (
        SandboxEnding.EXITED,
        3,
        "olleh\n",
        "oops\n",
    )
    assert not result.succeeded


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_ends_with_its_time(program: str) -> None:
    assert Sandbox(SandboxLimits(seconds=5)).run(program, "").ending is SandboxEnding.OUT_OF_TIME


def test_nothing_of_a_program_outlives_its_run() -> None:
    """The child detaches itself from its parent, which does not save it."""
    program = """
        import os, time
        name = "s" + os.urandom(6).hex()
        open("/proc/self/comm", "w").write(name)
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        print(name)
    """
    name = Sandbox(SandboxLimits(seconds=60)).run(_dedented(program), "").stdout.strip()
    assert name
    deadline = time.monotonic() + 30
    while (
        name in (alive := {_read(comm) for comm in Path("/proc").glob("[0-9]*/comm")})
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert name not in alive


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    result = sandbox.run("x = bytearray(1 << 30)", "")
    assert "MemoryError" in result.stderr


def test_processes_are_bounded(sandbox: Sandbox) -> None:
    program = """
        import os, time
        count = 0
        try:
            while count < 100:
                if os.fork() == 0:
                    time.sleep(1000)
                count += 1
        except BlockingIOError:
            print(count)
    """
    assert int(sandbox.run(_dedented(program), "").stdout.splitlines()[-1]) < 8


@pytest.mark.parametrize(
    "program", ["while True: print('x' * 1000)", "open('/tmp/x', 'w').write('y' * 100_000)"]
)
def test_output_and_files_are_bounded(sandbox: Sandbox, program: str) -> None:
    result = sandbox.run(program, "")
    assert "File too large" in result.stderr
    assert len(result.stdout) <= 10_000


def test_there_is_no_network(sandbox: Sandbox) -> None:
    program = (
        "import socket\nprint([name for _, name in "
        "socket.if_nameindex()])\nsocket.create_connection(('192.0.2.1', 80), 5)"
    )
    result = sandbox.run(program, "")
    assert result.stdout == "['lo']\n"
    assert "Network is unreachable" in result.stderr


def test_nothing_of_the_machine_is_seen_or_changed(sandbox: Sandbox) -> None:
    program = """
        import os, sys
        print(sorted(os.listdir("/")))
        print(os.environ.get("PATH"), os.getuid() == 0)
        print([pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 20])
        for path in ("/usr/x", "/program.py", "/python/x"):
            try:
                open(path, "w")
            except OSError as error:
                print(type(error).__name__)
    """
    lines = sandbox.run(_dedented(program), "").stdout.splitlines()
    assert (
        lines[0] == "['bin', 'dev', 'lib', 'lib64', 'proc', 'program.py', 'python', 'tmp', 'usr']"
    )
    assert lines[1:3] == ["None False", "[]"]
    assert len(lines) == 6


def test_a_program_that_is_killed_says_by_what(sandbox: Sandbox) -> None:
    result = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "")
    assert (result.ending, result.status) == (SandboxEnding.KILLED, 11)


def test_where_nothing_confines_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bwrap that the kernel refuses, as in a pod with the restricted profile, and a machine
    without any.
    """
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        SettingsError, match=r"No permissions to create new namespace.*CAP_SYS_ADMIN"
    ):
        Sandbox(SandboxLimits())
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="needs bwrap, prlimit, setpriv: install"):
        Sandbox(SandboxLimits())


def _dedented(program: str) -> str:
    return textwrap.dedent(program)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
