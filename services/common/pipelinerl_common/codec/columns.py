"""Conversion of byte columns and version runs."""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.v1 import sample_pb2
from pipelinerl_common.errors import MalformedMessage
from pipelinerl_common.types import VersionRun

UINT32: Final = np.dtype("<u4")
FLOAT32: Final = np.dtype("<f4")
UINT8: Final = np.dtype("u1")


def to_bytes(column: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The column's little-endian bytes. Raises ValueError when it is not one-dimensional."""
    if column.ndim != 1:
        raise ValueError(f"a column has one dimension, not shape {column.shape}")
    return column.astype(dtype, copy=False).tobytes()


def from_bytes(data: bytes, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """A read-only view of `data`. Raises MalformedMessage unless the length is a multiple of the
    item size.
    """
    if len(data) % dtype.itemsize:
        raise MalformedMessage(
            f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}", "column"
        )
    return np.frombuffer(data, dtype)


def sized(data: bytes, dtype: np.dtype[Any], name: str, length: int) -> NDArray[Any]:
    """A view as of `from_bytes`, with a check of the number of items."""
    column = from_bytes(data, dtype, name)
    if len(column) != length:
        raise MalformedMessage(f"{name} has {len(column)} items instead of {length}", "column")
    return column


def runs_to_proto(runs: Iterable[VersionRun]) -> list[sample_pb2.VersionRun]:
    return [
        sample_pb2.VersionRun(policy_version=run.policy_version, num_tokens=run.num_tokens)
        for run in runs
    ]


def runs_from_proto(
    runs: Iterable[sample_pb2.VersionRun], num_tokens: int
) -> tuple[VersionRun, ...]:
    """Raises MalformedMessage unless the runs are non-empty, have versions from 0 on, and add up to
    `num_tokens`.
    """
    decoded = []
    total = 0
    for run in runs:
        version, length = run.policy_version, run.num_tokens
        if version < 0 or length == 0:
            raise MalformedMessage(
                f"version run ({version}, {length}): the version must be 0 or more and the length "
                "1 or more",
                "version_runs",
            )
        decoded.append(VersionRun(version, length))
        total += length
    if total != num_tokens:
        raise MalformedMessage(
            f"version runs add up to {total} tokens instead of {num_tokens}", "version_runs"
        )
    return tuple(decoded)
