"""DeepSpeed is set up once, before any test imports it; what other tests of the same process could
notice is set back.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from pipelinerl_trainer.engine import COLLECTIVE_WARNING, prepare_environment

_RANK_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
_BEFORE = dict(os.environ)

prepare_environment(0, 0, 1)
os.environ.clear()
os.environ.update(_BEFORE)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"ignore:{COLLECTIVE_WARNING}:FutureWarning")
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.*` is deprecated:DeprecationWarning"
    )


@pytest.fixture(autouse=True)
def one_small_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only rank, with one thread for models this small."""
    for name, value in _RANK_VARIABLES.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
