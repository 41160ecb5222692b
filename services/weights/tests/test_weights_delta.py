"""Deltas give back every bit, are hardly larger than what they replace, and write nowhere else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelinerl_common.errors import MalformedMessage
from pipelinerl_weights import delta
from pipelinerl_weights.delta import HEADER_BYTES, decode, encode


def buffer(items: list[int]) -> Tensor:
    return torch.tensor(items, dtype=torch.int32).to(torch.int16).view(torch.uint8)


def kind_of(encoded: Tensor) -> int:
    return int(encoded[:HEADER_BYTES].clone().view(torch.int64)[0])


def weights(num: int = 100_000, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.randn(num, generator=generator)


def as_bytes(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return values.to(dtype).view(torch.uint8).clone()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 65_535), max_size=600),
    st.lists(st.tuples(st.integers(0, 599), st.integers(0, 65_535)), max_size=60),
)
def test_every_bit_comes_back(base_items: list[int], changes: list[tuple[int, int]]) -> None:
    new_items = list(base_items)
    for place, bits in changes:
        if place < len(new_items):
            new_items[place] = bits
    base, new = buffer(base_items), buffer(new_items)
    encoded = encode(new, base)
    assert len(encoded) <= len(new) + HEADER_BYTES
    decode(encoded, base)
    assert torch.equal(base, new)


@pytest.mark.parametrize(
    ("every", "step", "kind"),
    [(1, 1, delta.BITMAP), (3, -1, delta.BITMAP), (100, 1, delta.GAPS), (700, 3, delta.GAPS)],
)
def test_positions_are_kept_the_shorter_way(every: int, step: int, kind: int) -> None:
    base = as_bytes(weights())
    new = base.clone()
    new.view(torch.int16)[::every] += step
    encoded = encode(new, base)
    assert kind_of(encoded) == kind
    assert len(encoded) < len(new) * (1 / 16 + 1 / (2 * every)) + HEADER_BYTES + 1
    decode(encoded, base)
    assert torch.equal(base, new)


def test_one_optimizer_step_of_a_small_learning_rate_is_a_small_part() -> None:
    master = weights()
    base = as_bytes(master)
    new = as_bytes(master - 1e-6 * torch.sign(weights(seed=1)))
    encoded = encode(new, base)
    assert len(encoded) < 0.1 * len(new)
    decode(encoded, base)
    assert torch.equal(base, new)


def test_nothing_changed_is_a_header() -> None:
    base = as_bytes(weights())
    assert len(encode(base.clone(), base)) == HEADER_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_weights_are_sent_in_full(dtype: torch.dtype) -> None:
    base, new = as_bytes(weights(), dtype), as_bytes(weights(seed=1), dtype)
    encoded = encode(new, base)
    assert kind_of(encoded) == delta.FULL
    assert len(encoded) == len(new) + HEADER_BYTES
    decode(encoded, base)
    assert torch.equal(base, new)


def test_numbers_that_are_none_keep_their_bits() -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1e-40] * 16)
    base, new = as_bytes(torch.zeros(80)), as_bytes(special)
    new[0] = 3  # a NaN of other bits
    decode(encode(new, base), base)
    assert torch.equal(base, new)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    st.integers(-40, 40),
)
def test_a_malformed_delta_raises_and_changes_nothing(
    every: int, changes: list[tuple[int, int]], cut: int
) -> None:
    """Whatever bytes arrive: an error and no change, or a write within the base only."""
    base = as_bytes(weights(400))
    new = base.clone()
    new.view(torch.int16)[:: (1, 9, 40, 390)[every]] += 1
    encoded = encode(new, base)
    for place, byte in changes:
        encoded[place % len(encoded)] = byte
    encoded = encoded[:cut] if cut < 0 else torch.cat([encoded, encoded[:cut]])
    fence = torch.full((4096 + len(base) + 4096,), 7, dtype=torch.uint8)
    inside = fence[4096:-4096]
    inside.copy_(base)
    try:
        decode(encoded, inside)
    except MalformedMessage:
        assert torch.equal(inside, base)
    assert bool((fence[:4096] == 7).all())
    assert bool((fence[-4096:] == 7).all())


def header(kind: int, items: int, changed: int, wide: int) -> list[int]:
    return list(np.array([kind, items, changed, wide], dtype=np.int64).tobytes())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "no header"),
        (header(9, 8, 0, 0), "unknown kind 9"),
        (header(2, 9, 0, 0), "of 9 items, the base has 8"),
        (header(2, 8, 9, 0), "0 wide of 9 changed of 8"),
        (header(2, 8, -1, 0), "0 wide of -1 changed"),
        (header(0, 8, 0, 0) + [1] * 15, "15 full bytes for 16"),
        (header(2, 8, 4, 0) + [1] * 3, "cannot hold 4 changes"),
        ([*header(2, 8, 1, 1), 1, 1, 5, 0], "wide items are not those marked"),
        ([*header(2, 8, 1, 0), 1, 8], "changed item 8 of 8"),
        ([*header(2, 8, 1, 0), 1, 255], "gaps are not those"),
        ([*header(2, 8, 1, 0), 1, 1, 255], "gaps are not those"),
        ([*header(1, 8, 1, 0), 1, 1, 0], "bitmap of 2 bytes"),
        ([*header(1, 8, 1, 0), 1, 3], "does not mark 1"),
    ],
)
def test_what_encode_never_makes_is_refused(content: list[int], message: str) -> None:
    base = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(MalformedMessage, match=message):
        decode(torch.tensor(content, dtype=torch.uint8), base)
    assert not base.any()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes against a base of 6"):
        encode(torch.zeros(4, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8))
    with pytest.raises(ValueError, match="16-bit items"):
        encode(torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
