"""Runs of `pipelinerl up` as a user starts them: real services as processes, on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import process_tree

ROOT = Path(__file__).parents[1]
ARITHMETIC = ROOT / "e2e" / "jobs" / "arithmetic.yaml"
DEADLINE_S = 280.0


@dataclass
class Run:
    """One `pipelinerl up` process and its folder."""

    output: Path
    arguments: tuple[str, ...] = ()
    job: Path = ARITHMETIC
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, *more: str) -> "Run":
        command = [
            sys.executable,
            "-m",
            "pipelinerl_cli",
            "up",
            str(self.job),
            "--output",
            str(self.output),
        ]
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with (self.output.parent / f"{self.output.name}.terminal").open("ab") as terminal:
            self.process = subprocess.Popen(
                [*command, *self.arguments, *more],
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    @property
    def terminal(self) -> str:
        return (self.output.parent / f"{self.output.name}.terminal").read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Waits for `up` to end and returns its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"`up` has not ended after {timeout_s:g} s\n{self.terminal[-4000:]}"
            ) from None

    def wait_until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, (
                f"`up` ended while waiting for {what}\n{self.terminal[-4000:]}"
            )
            assert time.monotonic() < deadline, (
                f"no {what} after {timeout_s:g} s\n{self.terminal[-4000:]}"
            )
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.steps) >= step, f"step {step}")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Values of the trainer's records, by step; a step that was trained again counts once, as
        its last record.
        """
        records = {
            record["step"]: record["values"]
            for record in self.records
            if record["role"] == "trainer" and record["step"] >= 0
        }
        return [records[step] for step in sorted(records)]

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return summary

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The preprocessor's record of which groups each committed step trained."""
        return [
            json.loads(line) for line in (self.output / "trained.jsonl").read_text().splitlines()
        ]

    def pids(self, name: str) -> list[int]:
        """Processes of one service (for example `actor-0`, or `nats-server`) that belong to this
        run's folder.
        """
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            mine = any(word.startswith(str(self.output)) for word in words)
            named = "--name" in words and words[words.index("--name") + 1] == name
            if mine and (named or (name == "nats-server" and words[0].endswith("nats-server"))):
                found.append(int(folder.name))
        return found

    def memory_bytes(self, name: str) -> int:
        """Resident memory of one service's processes and their children."""
        return sum(
            map(
                _resident_bytes,
                {each.pid for root in self.pids(name) for each in process_tree(root)},
            )
        )

    def kill(self, name: str) -> None:
        """Kills one service's processes with SIGKILL."""
        pids = self.pids(name)
        assert pids, f"{name} does not run"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Command lines that still name this run's folder."""
        lines = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    line = (
                        (folder / "cmdline")
                        .read_bytes()
                        .decode(errors="replace")
                        .replace("\0", " ")
                    )
                except OSError:
                    continue
                if str(self.output) in line:
                    lines.append(line)
        return lines


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
