"""Rows of a file or folder, each with the place that errors about it name."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl_common.errors import SettingsError

WHERE = "spec.task.args.data"


class Row(NamedTuple):
    """Example: Row("train.jsonl:3", {"problem": "1+1", "answer": 2})."""

    place: str
    fields: Mapping[str, Any]


def read_rows(path: Path, split: str) -> list[Row]:
    """All rows, in the order of the file. Raises SettingsError that names the file, and the line
    where there is one.
    """
    if path.is_dir():
        return list(_folder(path, split))
    if not path.exists():
        raise SettingsError(f"{WHERE}.path: there is no file or folder {path.absolute()}")
    return list(_reader_of(path)(path))


def _reader_of(path: Path) -> Callable[[Path], Iterator[Row]]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise SettingsError(
            f"{WHERE}.path: {path} is of no known kind; use {', '.join(_READERS)} or a folder"
        )
    return reader


def _folder(path: Path, split: str) -> Iterator[Row]:
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


def _saved_to_disk(path: Path, split: str) -> Iterator[Row]:
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
        yield Row(f"{path} row {index}", fields)


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{WHERE}.path: {path.absolute()} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Row(f"{path}:{number}", _object(line, f"{path}:{number}"))


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"{place}: a {type(fields).__name__}, not an object")
    return fields


def _parquet(path: Path) -> Iterator[Row]:
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
        yield Row(f"{path} row {index}", fields)


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".parquet": _parquet}
