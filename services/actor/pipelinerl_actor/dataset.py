"""A task's problems: read from files, filtered, and put in an endless order.

The order is a pure function of the prompt's index, so that a retry or a resumed run gets the same
problems:

index   0 .. N-1   epoch 0, every problem once
        N .. 2N-1  epoch 1, every problem once, in another order
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import Field, model_validator

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings.base import Settings


class DifficultySettings(Settings):
    """Filter and curriculum by a number in every row."""

    field: Annotated[str, Field(min_length=1)]
    """Field of a row with its difficulty, a number; higher is harder."""
    min: float | None = None
    """Easier rows are left out."""
    max: float | None = None
    """Harder rows are left out."""
    curriculum_epochs: Annotated[int, Field(ge=0)] = 0
    """Number of first epochs that are ordered from easy to hard, with rows of equal difficulty
    shuffled; later ones are shuffled as a whole.
    """

    @model_validator(mode="after")
    def _some_row_can_pass(self) -> "DifficultySettings":
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"difficulty.min={self.min} is above difficulty.max={self.max}: no row can pass"
            )
        return self


class DataSettings(Settings):
    """Source of a task's problems, as `task.args.data` gives it."""

    path: Annotated[str, Field(min_length=1)]
    """A JSONL file, a Parquet file, or a folder: one that Hugging Face's `save_to_disk` wrote, or
    one of JSONL or Parquet files whose names begin with the split's.
    """
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split of a folder."""
    difficulty: DifficultySettings | None = None
    """Filter and curriculum by a number in every row."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: object) -> object:
        """`data: problems.jsonl` is short for `data: {path: problems.jsonl}`."""
        return {"path": given} if isinstance(given, str) else given


WHERE = "spec.task.args.data"


class DatasetRow(NamedTuple):
    """A row and the place that errors about it name.

    Example: DatasetRow("train.jsonl:3", {"problem": "1+1", "answer": 2}).
    """

    place: str
    fields: Mapping[str, Any]


def read_rows(path: Path, split: str) -> list[DatasetRow]:
    """All rows in the order of the file. Raises SettingsError that names the file and the line."""
    if path.is_dir():
        return list(_folder(path, split))
    if not path.exists():
        raise SettingsError(f"{WHERE}.path: there is no file or folder {path.absolute()}")
    return list(_reader_of(path)(path))


def _reader_of(path: Path) -> Callable[[Path], Iterator[DatasetRow]]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise SettingsError(
            f"{WHERE}.path: {path} has no known suffix; use {', '.join(_READERS)} or a folder"
        )
    return reader


def _folder(path: Path, split: str) -> Iterator[DatasetRow]:
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        yield from _saved_to_disk(path, split)
        return
    places = (path, path / "data")
    files = sorted(
        each
        for place in places
        if place.is_dir()
        for each in place.iterdir()
        if each.suffix in _READERS and each.stem.split("-")[0] == split
    )
    if not files:
        known = ", ".join(_READERS)
        raise SettingsError(
            f"{WHERE}: folder {path.absolute()} holds no file of split {split!r} ({split}*, one of "
            f"{known})"
        )
    for file in files:
        yield from _reader_of(file)(file)


def _saved_to_disk(path: Path, split: str) -> Iterator[DatasetRow]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise SettingsError(
            f"{WHERE}.path: {path} needs the package datasets: pip install 'pipelinerl[datasets]'"
        ) from error
    saved = load_from_disk(str(path))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise SettingsError(
                f"{WHERE}.split={split!r}: {path} has the splits {', '.join(saved)}"
            )
        saved = saved[split]
    for index, fields in enumerate(saved):
        yield DatasetRow(f"{path} row {index}", fields)


def _jsonl(path: Path) -> Iterator[DatasetRow]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{WHERE}.path: {path.absolute()} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield DatasetRow(f"{path}:{number}", _object(line, f"{path}:{number}"))


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"{place}: a {type(fields).__name__}, not an object")
    return fields


def _parquet(path: Path) -> Iterator[DatasetRow]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise SettingsError(
            f"{WHERE}.path: {path} needs the package pyarrow: pip install 'pipelinerl[datasets]'"
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowInvalid) as error:
        raise SettingsError(f"{WHERE}.path: {path.absolute()} cannot be read: {error}") from error
    for index, fields in enumerate(rows):
        yield DatasetRow(f"{path} row {index}", fields)


_READERS: Mapping[str, Callable[[Path], Iterator[DatasetRow]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


Problem = TypeVar("Problem")


class Problems(Generic[Problem]):
    """N problems that passed the filter, with `[index]` for any index from 0 on."""

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
        cls, data: DataSettings, seed: int, parse: Callable[[DatasetRow], Problem]
    ) -> "Problems[Problem]":
        """Parses every row at once, so that a wrong one is found before the first step.

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
                f"{WHERE}.difficulty: none of the {len(rows)} rows is between "
                f"min={data.difficulty.min} and max={data.difficulty.max}; "
                f"{data.difficulty.field!r} ranges from {min(found):g} to {max(found):g}"
            )
        # Rows that are filtered out need not be right.
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


def field_of(row: DatasetRow, name: str) -> object:
    """Raises SettingsError that names the row's fields for a missing one."""
    if name not in row.fields:
        raise SettingsError(
            f"{row.place}: no field {name!r}; it has {', '.join(map(repr, row.fields)) or 'none'}"
        )
    return row.fields[name]


def text_of(row: DatasetRow, name: str) -> str:
    value = field_of(row, name)
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"{row.place}: {name!r} is {value!r}, not a text")
    return value


def _difficulty(row: DatasetRow, name: str) -> float:
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
