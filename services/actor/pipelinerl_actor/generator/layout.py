"""Which tensors a model's checkpoint consists of, and whether a manifest fits it."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipelinerl_common.errors import PermanentError, SettingsError
from pipelinerl_weights.adapter import WEIGHT, a_name, b_name, layer_of
from pipelinerl_weights.manifest import ITEM_BYTES, Manifest

_MAX_HEADER_BYTES = 100_000_000
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
_FLOATING = tuple(name for name in ITEM_BYTES if name.startswith(("float", "bfloat")))
_LISTED = 5


class Expected(Protocol):
    """What an update may bring."""

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch."""
        ...


class ManifestMismatch(PermanentError):
    """The manifest is not one of this model's weights."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that an update must bring, with their shapes, in the checkpoint's naming."""

    shapes: Mapping[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()
    """May be missing: an output layer that is tied to the embeddings."""

    @classmethod
    def of_folder(cls, folder: Path) -> "Layout":
        """Reads the headers of the folder's safetensors files. Raises SettingsError."""
        if not folder.is_dir():
            raise SettingsError(f"--model {folder}: no such folder; prepare the job's model first")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise SettingsError(f"--model {folder}: holds no *.safetensors file; save the model with save_pretrained")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes.update(_read_header(file))
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(_NOT_WEIGHTS)}
        tied = bool(read_config(folder).get("tie_word_embeddings", False))
        return cls(shapes, frozenset(["lm_head.weight"]) if tied else frozenset())

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch that lists what is missing, unknown, or of another shape or type."""
        given = {tensor.name: tensor for tensor in manifest.tensors}
        faults = [f"missing: {_some(names)}" for names in [self.shapes.keys() - given.keys() - self.optional] if names]
        faults += [f"unknown: {_some(names)}" for names in [given.keys() - self.shapes.keys() - self.optional] if names]
        wrong = [
            f"{name} is {list(tensor.shape)}, not {list(self.shapes[name])}"
            for name, tensor in given.items()
            if name in self.shapes and tensor.shape != self.shapes[name]
        ]
        faults += [f"shapes: {_some(wrong)}"] if wrong else []
        _refuse(faults + _wrong_types(manifest), "the model")


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The same for a job with `model.adapter`: A [rank, in] and B [out, rank] of any of the model's layers [out, in]."""

    model: Layout
    rank: int

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch that lists what is no adapter, lacks its other half, or is of another shape or type."""
        given = {tensor.name: tensor.shape for tensor in manifest.tensors}
        layers = {name: layer_of(name) for name in given}
        unknown = [name for name, layer in layers.items() if len(self.model.shapes.get(f"{layer}{WEIGHT}", ())) != 2]
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in {layer for name, layer in layers.items() if layer is not None and name not in unknown}:
            num_out, num_in = self.model.shapes[f"{layer}{WEIGHT}"]
            shapes |= {a_name(layer): (self.rank, num_in), b_name(layer): (num_out, self.rank)}
        wrong = [
            f"{name} is {list(given[name])}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in given and given[name] != shape
        ]
        faults = [f"unknown: {_some(unknown)}"] if unknown else []
        faults += [f"missing: {_some(names)}" for names in [shapes.keys() - given.keys()] if names]
        faults += [f"shapes: {_some(wrong)}"] if wrong else []
        _refuse(faults + _wrong_types(manifest), f"an adapter of rank {self.rank} for the model")


def _wrong_types(manifest: Manifest) -> list[str]:
    integers = [f"{tensor.name} is {tensor.dtype}" for tensor in manifest.tensors if tensor.dtype not in _FLOATING]
    return [f"types: {_some(integers)}"] if integers else []


def _refuse(faults: list[str], what: str) -> None:
    if faults:
        raise ManifestMismatch(f"the manifest does not fit {what}; {'; '.join(faults)}")


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file (https://github.com/huggingface/safetensors#format)."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise SettingsError(f"{file}: not a safetensors file: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; of a model with several parts, the text part's. Raises SettingsError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}; it belongs to a model in Hugging Face format") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file}: not a mapping")
    return {**config, **config.get("text_config", {})}


def _some(names: "set[str] | list[str]") -> str:
    shown = sorted(names)[:_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
