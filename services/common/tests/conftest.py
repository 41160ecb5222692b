"""A real nats-server for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipelinerl_common.stream import NatsServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer.start(tmp_path / "nats") as running:
        yield running
