"""The tensors that a model's checkpoint consists of, and the check of a manifest against them."""

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


class ExpectedWeights(Protocol):
    """The tensors that an update may bring."""

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch."""
        ...


class ManifestMismatch(PermanentError):
    """The manifest does not describe this model's weights."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Tensors that an update must bring, with their shapes, in the checkpoint's naming."""

    shapes: Mapping[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()
    """Tensors that may be missing: an output layer that is tied to the embeddings."""

    @classmethod
    def of_folder(cls, folder: Path) -> "WeightLayout":
        """Reads the headers of the folder's safetensors files. Raises SettingsError."""
        if not folder.is_dir():
            raise SettingsError(f"--model {folder}: no such folder; prepare the job's model first")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise SettingsError(
                f"--model {folder}: holds no *.safetensors file; save the model with "
                "save_pretrained"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes.update(_read_header(file))
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(_NOT_WEIGHTS)}
        tied = bool(read_config(folder).get("tie_word_embeddings", False))
        return cls(shapes, frozenset(["lm_head.weight"]) if tied else frozenset())

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch with what is missing, unknown, or of another shape or type."""
        _check(manifest, self.shapes, self.optional, "the model")


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The tensors of an update in a job with `model.adapter`: A [rank, in] and B [out, rank] of any
    of the model's layers [out, in].
    """

    model: WeightLayout
    rank: int

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch with what is not an adapter, lacks its other half, or is of
        another shape or type.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in {layer_of(tensor.name) for tensor in manifest.tensors}:
            weight = self.model.shapes.get(f"{layer}{WEIGHT}", ())
            if layer is not None and len(weight) == 2:
                num_out, num_in = weight
                shapes |= {a_name(layer): (self.rank, num_in), b_name(layer): (num_out, self.rank)}
        _check(manifest, shapes, frozenset(), f"an adapter of rank {self.rank} for the model")


def _check(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], optional: frozenset[str], what: str
) -> None:
    given = {tensor.name: tensor for tensor in manifest.tensors}
    faults = {
        "missing": shapes.keys() - given.keys() - optional,
        "unknown": given.keys() - shapes.keys() - optional,
        "shapes": {
            f"{name} is {list(given[name].shape)}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in given and given[name].shape != shape
        },
        "types": {
            f"{name} is {tensor.dtype}"
            for name, tensor in given.items()
            if tensor.dtype not in _FLOATING
        },
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise ManifestMismatch(f"the manifest does not fit {what}; {listed}")


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file
    (https://github.com/huggingface/safetensors#format).
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        return {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise SettingsError(f"{file}: not a safetensors file: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, with that of the text part of a multimodal model. Raises
    SettingsError.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{file}: cannot be read: {error}; it belongs to a model in Hugging Face format"
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file}: not a mapping")
    return {**config, **config.get("text_config", {})}


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
