"""Runs untrusted Python with `bubblewrap`: no network, no files of the machine except a read-only
Python, and limits on everything.

An actor that is root (as in a container with CAP_SYS_ADMIN) runs each program under a user id of
its own; any other needs unprivileged user namespaces. Where neither works the sandbox raises an
error when it is made: no program runs unconfined.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Annotated

from pydantic import Field

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings.base import Settings

_PROGRAM = "/program.py"
_FIRST_UID = 1_000_000
"""User ids from here on are unused, so that limits per user, such as that of processes, are limits
per run.
"""
_KILL_S = 5.0
_PROGRAMS = ("bwrap", "prlimit", "setpriv")
_MISSING = "install the Debian packages bubblewrap and util-linux in the actor's image"
_REFUSED = (
    "a container needs CAP_SYS_ADMIN, or a seccomp profile and a kernel that allow unprivileged "
    "user namespaces; the restricted profile of Kubernetes allows neither"
)


class SandboxLimits(Settings):
    """Limits of one run."""

    seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Wall-clock time."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 512 << 20
    """Address space of each process, and size of /tmp."""
    processes: Annotated[int, Field(ge=1, le=4096)] = 16
    output_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """Size of stdout, of stderr, and of every file that is written."""


DEFAULT_LIMITS = SandboxLimits()


class SandboxEnding(StrEnum):
    """The end of a program."""

    EXITED = "exited"
    OUT_OF_TIME = "out_of_time"
    KILLED = "killed"
    """Ended by a signal: its own, or that of a limit."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of one run; output beyond the limit is cut off.

    Example: SandboxResult(SandboxEnding.EXITED, 1, "", "Traceback ...").
    """

    ending: SandboxEnding
    status: int
    """Exit status; for KILLED the signal's number; 0 when out of time."""
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        return self.ending is SandboxEnding.EXITED and self.status == 0


class Sandbox:
    """Runs programs under `limits`. Safe for use from several threads at once."""

    def __init__(self, limits: SandboxLimits) -> None:
        """Raises SettingsError with the remedy when this machine cannot confine a program."""
        missing = [name for name in _PROGRAMS if shutil.which(name) is None]
        if missing:
            raise SettingsError(f"the code sandbox needs {', '.join(missing)}: {_MISSING}")
        self._bwrap = shutil.which("bwrap") or "bwrap"
        self._limits = limits
        probe = self.run("print(6 * 7)", "")
        if not probe.succeeded or probe.stdout != "42\n":
            reason = (
                probe.stderr.strip()[-500:]
                or f"the probe {probe.ending} with status {probe.status}"
            )
            raise SettingsError(f"the code sandbox does not work here ({reason}): {_REFUSED}")

    def run(self, program: str, stdin: str) -> SandboxResult:
        """Runs `program` with Python's standard library only. All its processes have ended on
        return.
        """
        with (
            tempfile.TemporaryFile() as source,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            _fill(source, program)
            _fill(given, stdin)
            process = subprocess.Popen(
                self._command(source.fileno()),
                stdin=given,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(source.fileno(),),
                cwd="/",
                env={},
                start_new_session=True,
            )
            ending, status = self._wait(process)
            return SandboxResult(ending, status, self._text(stdout), self._text(stderr))

    def _wait(self, process: "subprocess.Popen[bytes]") -> tuple[SandboxEnding, int]:
        try:
            status = process.wait(self._limits.seconds)
        except subprocess.TimeoutExpired:
            return SandboxEnding.OUT_OF_TIME, 0
        finally:
            # The first process of the namespace: the kernel ends the others with it.
            process.kill()
            process.wait(_KILL_S)
        # bubblewrap reports a signal as shells do; a program that exits above 128 looks the same.
        signalled = -status if status < 0 else status - 128 if status > 128 else 0
        return (
            (SandboxEnding.KILLED, signalled)
            if signalled in set(signal.Signals)
            else (SandboxEnding.EXITED, status)
        )

    def _command(self, program_fd: int) -> list[str]:
        python = sys.base_prefix
        is_root = os.geteuid() == 0
        confined = [
            *(self._bwrap, "--unshare-ipc", "--unshare-net", "--unshare-pid"),
            *("--unshare-uts", "--unshare-cgroup-try"),
            *(() if is_root else ("--unshare-user", "--disable-userns")),
            *("--die-with-parent", "--new-session", "--clearenv", "--setenv", "HOME", "/tmp"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *(part for folder in ("/lib", "/lib64") for part in ("--ro-bind-try", folder, folder)),
            *("--ro-bind", python, "/python", "--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(self._limits.memory_bytes)),
            *("--tmpfs", "/tmp", "--chdir", "/tmp"),
            *("--perms", "0444", "--ro-bind-data", str(program_fd), _PROGRAM),
        ]
        # One user id per actor process, so that its runs share no limit with another actor's.
        uid = str(_FIRST_UID + os.getpid() % _FIRST_UID)
        groups = (
            ("--reuid", uid, "--regid", uid, "--clear-groups", "--bounding-set", "-all")
            if is_root
            else ()
        )
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return [
            *confined,
            *("setpriv", *groups, "--inh-caps", "-all", "--no-new-privs"),
            *("prlimit", f"--as={self._limits.memory_bytes}", f"--nproc={self._limits.processes}"),
            *(f"--fsize={self._limits.output_bytes}", "--core=0", "--nofile=256"),
            f"--cpu={max(1, round(self._limits.seconds))}",
            *(f"/python/bin/{version}", "-I", "-B", _PROGRAM),
        ]

    def _text(self, stream: IO[bytes]) -> str:
        stream.seek(0)
        return stream.read(self._limits.output_bytes).decode(errors="replace")


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode(errors="replace"))
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
