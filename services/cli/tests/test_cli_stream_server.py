"""The run's nats-server is kept running."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pipelinerl_cli.up import nats_server
from pipelinerl_cli.up.nats_server import NatsServerProcess
from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.settings import StreamSettings
from pipelinerl_common.stream import Login, connect

DEADLINE_S = 30.0


@pytest.mark.parametrize("fault", ["killed", "full disk"])
async def test_a_server_that_died_or_had_a_full_disk_is_started_again(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats_server, "LOOK_S", 0.05)
    restarted = asyncio.Queue[str]()
    with Ports() as ports:
        server = NatsServerProcess(tmp_path, ports.reserve(), "token", restarted.put_nowait)
        running = asyncio.create_task(server.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await server.ready.wait()
                first = server.pid
                assert first is not None
                if fault == "killed":
                    os.kill(first, signal.SIGKILL)
                else:
                    with (tmp_path / "nats-server.log").open("ab") as log:
                        log.write(
                            b"[ERR] JetStream failed to store a msg: no space left on device\n"
                        )
                assert await restarted.get() == "nats"
                async with connect(
                    server.url,
                    "job",
                    StreamSettings(),
                    name="test",
                    login=Login(token="token"),
                    timeout_s=DEADLINE_S,
                ):
                    assert server.pid != first
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert ("is full: free some" in caplog.text) == (fault == "full disk")
