"""Fixtures of the tests that run `pipelinerl up`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from up_run import ARITHMETIC, Run


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs in the test's folder and ends what is left of them."""
    runs: list[Run] = []

    def make(name: str, *arguments: str, job: Path = ARITHMETIC) -> Run:
        run = Run(tmp_path / name, arguments, job)
        runs.append(run)
        return run

    yield make
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait(30)
