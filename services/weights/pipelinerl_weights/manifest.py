"""The tensors of a policy version. Imports no torch.

The members of a transfer make their plan from one manifest, so only bytes travel during an update.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipelinerl.v1 import weights_pb2
from pipelinerl_common.errors import MalformedMessage

ALIGNMENT = 16
"""Bytes. Every block of a buffer starts on a multiple, so that it can be viewed as any dtype."""

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. Example: TensorSpec("lm_head.weight", "bfloat16", (151936, 896)) of 272 269 312
    bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise MalformedMessage("a tensor of the manifest has an empty name")
        if self.dtype not in ITEM_BYTES:
            raise MalformedMessage(
                f"{self.name}: unknown dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}"
            )
        if any(size < 0 for size in self.shape):
            raise MalformedMessage(f"{self.name}: negative size in shape {self.shape}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """All tensors in the order in which they are sent, in buffers of at most `bucket_bytes`."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0:
            raise MalformedMessage(f"bucket_bytes={self.bucket_bytes} must be above 0")
        if not self.tensors:
            raise MalformedMessage("the manifest lists no tensors")
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise MalformedMessage(f"the manifest lists {tensor.name} twice")
            seen.add(tensor.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors themselves, without padding."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which an UpdateRequest carries. Example: {"tensors": [{"name": "w",
        "dtype": "float32", "shape": [2, 3]}], "bucket_bytes": 1024}.
        """
        tensors = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for tensor in self.tensors
        ]
        return {"tensors": tensors, "bucket_bytes": self.bucket_bytes}

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form: the name by which updates refer to a manifest sent before."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Manifest":
        """Raises MalformedMessage."""
        try:
            tensors = tuple(
                TensorSpec(
                    str(item["name"]),
                    str(item["dtype"]),
                    tuple(int(size) for size in item["shape"]),
                )
                for item in document["tensors"]
            )
            return cls(tensors, int(document["bucket_bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage(f"not a weight manifest: {error!r}") from error

    def to_proto(self) -> weights_pb2.WeightManifest:
        tensors = [
            weights_pb2.TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
            for tensor in self.tensors
        ]
        return weights_pb2.WeightManifest(tensors=tensors, bucket_bytes=self.bucket_bytes)

    @classmethod
    def from_proto(cls, message: weights_pb2.WeightManifest) -> "Manifest":
        """Raises MalformedMessage."""
        tensors = tuple(
            TensorSpec(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors
        )
        return cls(tensors, message.bucket_bytes)
