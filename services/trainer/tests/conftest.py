"""DeepSpeed and torch are set up once, before any test imports them."""

import pytest
import torch

from pipelinerl_trainer.engine import COLLECTIVE_WARNING, prepare_environment

torch.set_num_threads(1)
prepare_environment(0, 0, 1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"ignore:{COLLECTIVE_WARNING}:FutureWarning")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*` is deprecated:DeprecationWarning")
