"""A checksum of packed chunks, computed where the bytes are (host or device) with wrapping 64-bit
integers.

    checksum(chunk)   = sum of w * COLUMN[c] * ROW[r], modulo 2**64, over the 64-bit words w at
                        row r and column c
    checksum(version) = fold of the chunks' checksums, in the plan's order

All factors are odd and differ by position: a changed, moved or missing word changes the sum. It
guards against errors of transport and layout, not against an adversary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 4096
_MASK = (1 << 64) - 1
_COLUMN_STEP = 0x9E3779B97F4A7C15
_ROW_STEP = 0xC2B2AE3D27D4EB4F
_FOLD = 0x100000001B3
_HOST_ROWS = 32
"""Rows per pass on the host: the products (1 MiB) stay in the cache, which makes it several times
faster.
"""
_DEVICE_ROWS = 4096


def chunk_checksum(chunk: Tensor) -> Tensor:
    """Returns the checksum of `chunk` (1-d uint8, a multiple of 8 bytes) as a 0-d int64 tensor on
    its device, without waiting for it.
    """
    words = chunk.view(torch.int64)
    rows = words.numel() // _COLUMNS
    columns_C = _odd_factors(_COLUMNS, _COLUMN_STEP, chunk.device)
    rows_R = _odd_factors(rows + 1, _ROW_STEP, chunk.device)
    total = (words[rows * _COLUMNS :] * columns_C[: words.numel() % _COLUMNS]).sum() * rows_R[rows]
    step = _HOST_ROWS if chunk.device.type == "cpu" else _DEVICE_ROWS
    table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    for start in range(0, rows, step):
        sums = (table[start : start + step] * columns_C).sum(1)
        total = total + (sums * rows_R[start : start + step][: len(sums)]).sum()
    return total


def checksum_text(value: Tensor) -> str:
    """Returns a chunk's checksum as 16 hexadecimal digits. Waits for the device."""
    return from_int64(int(value.item()))


def fold_checksums(sums: Sequence[str]) -> str:
    """Returns the version's checksum, 16 hexadecimal digits, from those of its chunks in order."""
    folded = len(sums)
    for value in sums:
        folded = (folded * _FOLD + int(value, 16)) & _MASK
        folded ^= folded >> 29
    return from_int64(folded)


def _odd_factors(count: int, step: int, device: torch.device) -> Tensor:
    return (torch.arange(count, dtype=torch.int64, device=device) * _signed(step)) | 1


def from_int64(value: int) -> str:
    """Returns the 16 hexadecimal digits of a signed 64-bit checksum."""
    return f"{value & _MASK:016x}"


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
