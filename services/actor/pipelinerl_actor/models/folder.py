"""Checks, without loading it, that a folder is a Hugging Face model that the generator and the
trainer can load.
"""

import json
import struct
from pathlib import Path
from typing import Any

from pipelinerl_common.errors import SettingsError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


def check_model_folder(folder: Path, max_model_len: int) -> None:
    """Raises SettingsError that names what is missing or broken in `folder`, and the remedy.

    Required: config.json with `architectures`, complete safetensors files, a tokenizer, and
    positions for `max_model_len` tokens.
    """
    if not folder.exists():
        raise _fault(f"no folder {folder}; give the path of a model in Hugging Face format")
    if not folder.is_dir():
        raise _fault(f"{folder} is a file; give the folder that holds config.json and the weights")
    config = _read_json(folder / "config.json", "it is not a Hugging Face model folder without it")
    if not config.get("architectures"):
        raise _fault(f"{folder / 'config.json'} names no 'architectures', so no engine can load it")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and max_model_len > positions:
        raise SettingsError(
            f"spec.model.maxModelLen={max_model_len} is more than the model's "
            f"max_position_embeddings={positions} ({folder})"
        )
    for name in _weight_files(folder):
        _check_safetensors(folder / name)
    _check_tokenizer(folder)


def _fault(what: str) -> SettingsError:
    return SettingsError(f"spec.model.uri: {what}")


def _read_json(path: Path, why: str) -> dict[str, Any]:
    if not path.is_file():
        raise _fault(f"{path} is missing; {why}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _fault(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise _fault(f"{path} holds a {type(content).__name__}, not a mapping")
    return content


def _weight_files(folder: Path) -> list[str]:
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _fault(f"{folder / _INDEX} has no 'weight_map'")
        return sorted(set(weight_map.values()))
    if not (folder / "model.safetensors").is_file():
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f"; {other[0]} is a pickle, which is never loaded: save the model again with "
            "safe_serialization"
            if other
            else ""
        )
        raise _fault(f"{folder} has neither model.safetensors nor {_INDEX}{hint}")
    return ["model.safetensors"]


def _check_safetensors(path: Path) -> None:
    """Checks that all bytes are present: a safetensors file is 8 bytes of header length, a JSON
    header with byte ranges, and those bytes.
    """
    if not path.is_file():
        raise _fault(f"{path} is missing although the index lists it; download the model again")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise _fault(
            f"{path} is not a safetensors file ({error}); download the model again"
        ) from error
    # A download that was interrupted leaves a file that is too short.
    expected = 8 + header_bytes + max(ends, default=0)
    if size < expected:
        raise _fault(
            f"{path} is cut off: {size} of {expected} bytes are there; download the model again"
        )


def _check_tokenizer(folder: Path) -> None:
    has_fast = (folder / "tokenizer.json").is_file()
    has_slow = (folder / "tokenizer.model").is_file() or (
        (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    )
    if not (has_fast or has_slow):
        raise _fault(
            f"{folder} has no tokenizer: no tokenizer.json, no tokenizer.model, no "
            "vocab.json with merges.txt"
        )
    if not (folder / "tokenizer_config.json").is_file():
        raise _fault(
            f"{folder / 'tokenizer_config.json'} is missing; save the tokenizer beside the model"
        )
