"""The state of every random number generator of a rank, as JSON."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelinerl_trainer.export import save_json


def seed_everything(seed: int) -> None:
    """Seeds torch, numpy and Python. The same on every rank: ranks differ by their data, and their
    weights must begin equal.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def save_randomness(path: Path) -> None:
    """Raises WriteFailed."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(each) for each in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(words), gauss],
    }
    save_json(path, state)


def load_randomness(path: Path) -> None:
    """Raises OSError, or ValueError for a file that is not one of ours."""
    state = json.loads(path.read_text(encoding="utf-8"))
    name, keys, position, has_gauss, cached = state["numpy"]
    version, words, gauss = state["python"]
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all([_decode(each) for each in state["cuda"]])
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    random.setstate((version, tuple(words), gauss))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
