"""Plays Prometheus to the processes of a run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

EVERY_S = 1.0
ANSWER_S = 5.0


@dataclass
class Load:
    """What telemetry did in the runs that had it."""

    scrapes: int = 0
    """That were answered."""
    failed_scrapes: int = 0
    """Of a process that answered before and after: it should have served."""
    absent_scrapes: int = 0
    """Before a process listened, or after its last answer: targets are listed before their
    processes start.
    """
    bytes: int = 0
    spans: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    """By target that has answered: the scrapes that have failed since its last answer."""

    def answered(self, target: str, num_bytes: int) -> None:
        since = self._open.get(target, 0)
        self._open[target] = 0
        self.scrapes += 1
        self.bytes += num_bytes
        self.failed_scrapes += since
        self.absent_scrapes -= since

    def unanswered(self, target: str) -> None:
        self.absent_scrapes += 1
        if target in self._open:
            self._open[target] += 1

    def end_run(self) -> None:
        """The next run's processes are others, maybe at the same addresses."""
        self._open.clear()


@asynccontextmanager
async def scraping(targets_file: Path, load: Load) -> AsyncIterator[None]:
    """Reads every target once a second, from when the list is there to the end of the block."""

    async def scrape(session: aiohttp.ClientSession, target: str) -> None:
        try:
            async with session.get(f"http://{target}/metrics") as response:
                load.answered(target, len(await response.read()))
        except (aiohttp.ClientError, TimeoutError):
            load.unanswered(target)

    async def loop() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                await asyncio.gather(
                    *(scrape(session, target) for target in _targets(targets_file))
                )
                await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        load.end_run()


def _targets(file: Path) -> list[str]:
    return [each["targets"][0] for each in json.loads(file.read_text())] if file.exists() else []
