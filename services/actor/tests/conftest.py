"""The house is built anew for each test that asks for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from actor_house import TASKS, House, open_house


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    (tmp_path / "house_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_house(tmp_path) as house:
        yield house
