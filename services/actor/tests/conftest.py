"""Every test that uses the harness gets its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from actor_harness import TASKS, ActorHarness, open_harness


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ActorHarness]:
    (tmp_path / "harness_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_harness(tmp_path) as harness:
        yield harness
