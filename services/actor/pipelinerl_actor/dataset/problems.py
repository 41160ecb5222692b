"""Problems in an endless order: a pure function of the prompt's index, so that a retry or a resumed
run meets the same ones.

index   0 .. N-1   epoch 0, every problem once
        N .. 2N-1  epoch 1, every problem once, in another order
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from pipelinerl_actor.dataset.files import WHERE, Row, read_rows
from pipelinerl_actor.dataset.settings import DataSettings, DifficultySettings
from pipelinerl_common.errors import SettingsError

Problem = TypeVar("Problem")


class Problems(Generic[Problem]):
    """N problems that passed the filter. `[index]` with any index from 0 on."""

    def __init__(
        self,
        problems: Sequence[Problem],
        difficulties: Sequence[float] | None,
        curriculum_epochs: int,
        seed: int,
    ) -> None:
        self._problems = problems
        self._difficulties = difficulties
        self._curriculum_epochs = curriculum_epochs if difficulties is not None else 0
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._ordered)

    @classmethod
    def load(
        cls, data: DataSettings, seed: int, parse: Callable[[Row], Problem]
    ) -> "Problems[Problem]":
        """Reads every row and makes a problem of it, so that a wrong row is found before the first
        step.

        Raises SettingsError when a file cannot be read, a row is wrong, or no row passes the
        filter.
        """
        rows = read_rows(Path(data.path).expanduser(), data.split)
        if not rows:
            raise SettingsError(f"{WHERE}.path: {data.path} holds no problem")
        if data.difficulty is None:
            return cls([parse(row) for row in rows], None, 0, seed)
        rated = [(row, _difficulty(row, data.difficulty.field)) for row in rows]
        passed = [
            (row, difficulty) for row, difficulty in rated if _passes(difficulty, data.difficulty)
        ]
        if not passed:
            found = [difficulty for _, difficulty in rated]
            raise SettingsError(
                f"{WHERE}.difficulty: none of the {len(rows)} rows lies between "
                f"min={data.difficulty.min} and "
                f"max={data.difficulty.max}; {data.difficulty.field!r} goes from {min(found):g} to "
                f"{max(found):g}"
            )
        problems = [parse(row) for row, _ in passed]
        return cls(
            problems,
            [difficulty for _, difficulty in passed],
            data.difficulty.curriculum_epochs,
            seed,
        )

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._problems))
        return self._problems[self._order(epoch)[position]]

    def _ordered(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(f"problems {self._seed} {epoch}").shuffle(order)
        if self._difficulties is not None and epoch < self._curriculum_epochs:
            order.sort(key=self._difficulties.__getitem__)
        return order


def field_of(row: Row, name: str) -> object:
    """Raises SettingsError that names the fields that are there."""
    if name not in row.fields:
        raise SettingsError(
            f"{row.place}: no field {name!r}; it has {', '.join(map(repr, row.fields)) or 'none'}"
        )
    return row.fields[name]


def text_of(row: Row, name: str) -> str:
    value = field_of(row, name)
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"{row.place}: {name!r} is {value!r}, not a text")
    return value


def _difficulty(row: Row, name: str) -> float:
    value = field_of(row, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(
            f"{row.place}: {name!r} is {value!r}, not a finite number; {WHERE}.difficulty needs one"
        )
    return float(value)


def _passes(difficulty: float, settings: DifficultySettings) -> bool:
    return (settings.min is None or difficulty >= settings.min) and (
        settings.max is None or difficulty <= settings.max
    )
