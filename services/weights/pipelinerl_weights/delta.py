"""What changed between two versions of the same bytes: most bfloat16 weights keep their bits in an
optimizer step of a small learning rate.

`encode` compares 16-bit items, so bfloat16 and float16 weights item by item and float32 weights in
halves. `decode` turns the older bytes into the newer ones, bit by bit. An encoded chunk is

    header     4 int64: kind, items, changed items, wide items
    wide       2 bytes for each item that changed by more than a step fits: its new bits
    steps      1 byte for each changed item: the difference of its bits, as integers of 16 bits;
               WIDE says that its bits are the next of `wide`
    positions  of the changed items: a bit for every item (BITMAP), or the number of items
               between one and the next (GAPS), 255 and 255 more for each byte of 255

or FULL, header and the new bytes themselves, when the rest would not be smaller. Neighbouring
bfloat16 numbers differ by 1 as integers, so one step of the optimizer nearly always fits a byte.
"""

import torch
from torch import Tensor

from pipelinerl_common.errors import MalformedMessage

HEADER_BYTES = 32
FULL, BITMAP, GAPS = 0, 1, 2
WIDE = -128
_LARGEST_STEP = 127
_ESCAPE = 255
_GAPS_BELOW = 16
"""Gaps are tried when fewer than 1 / 16 of the items changed. A bitmap has 1 / 8 byte for each
item, gaps at least 1 byte for each changed item; their scratch memory of 8 bytes for each changed
item stays below the chunk's size as well.
"""


def encode(new: Tensor, base: Tensor) -> Tensor:
    """Returns the delta from `base` to `new`, two 1-d uint8 tensors of the same even size on one
    device: 1-d uint8, at most HEADER_BYTES larger than `new`. Waits for the device; scratch memory
    is about three times the chunk.
    """
    _check_buffers(new, base)
    new_N, base_N = new.view(torch.int16), base.view(torch.int16)
    changed_N = new_N != base_N
    num_changed = int(torch.count_nonzero(changed_N))
    kind = GAPS if num_changed * _GAPS_BELOW < len(new_N) else BITMAP
    # Few indices are made once and are faster than a mask; many would be larger than the chunk.
    chosen = changed_N.nonzero()[:, 0] if kind == GAPS else changed_N
    new_C = new_N[chosen]
    steps_C = new_C - base_N[chosen]  # wraps, and so does the sum in `decode`
    wide_C = (steps_C <= WIDE) | (steps_C > _LARGEST_STEP)
    wide = new_C[wide_C].view(torch.uint8)
    positions = _gaps(chosen) if kind == GAPS else _bitmap(chosen)
    if len(wide) + num_changed + len(positions) >= len(new):
        return torch.cat([_header(new, FULL, 0, 0), new])
    steps = steps_C.masked_fill(wide_C, WIDE).to(torch.int8).view(torch.uint8)
    header = _header(new, kind, num_changed, len(wide) // 2)
    return torch.cat([header, wide, steps, positions])


def decode(encoded: Tensor, base: Tensor) -> None:
    """Makes `base`, 1-d uint8, the newer bytes, in place. Waits for the device.

    Raises MalformedMessage for a delta whose lengths, counts or places do not fit each other and
    `base`, which is then as it was.
    """
    _check_buffers(base, base)
    kind, num_changed, num_wide = _parse_header(encoded, base)
    payload = encoded[HEADER_BYTES:]
    if kind == FULL:
        if len(payload) != len(base):
            raise MalformedMessage(f"delta: {len(payload)} full bytes for {len(base)}")
        base.copy_(payload)
        return
    sizes = (2 * num_wide, num_changed)
    if sum(sizes) > len(payload):
        raise MalformedMessage(f"delta: {len(payload)} bytes cannot hold {num_changed} changes")
    wide, steps, positions = torch.split(payload, [*sizes, len(payload) - sum(sizes)])
    steps_C = steps.view(torch.int8).to(torch.int16)
    is_wide_C = steps_C == WIDE
    if int(is_wide_C.sum()) != num_wide:
        raise MalformedMessage(f"delta: the header's {num_wide} wide items are not those marked")
    items_N = base.view(torch.int16)
    places_C = (
        _from_gaps(positions, num_changed, len(items_N))
        if kind == GAPS
        else _from_bitmap(positions, num_changed, len(items_N))
    )
    values_C = items_N[places_C] + steps_C
    # A copy: the bytes after the header may begin at an odd address.
    values_C[is_wide_C] = wide.clone().view(torch.int16)
    items_N[places_C] = values_C


def _check_buffers(new: Tensor, base: Tensor) -> None:
    for each in (new, base):
        if each.dtype != torch.uint8 or each.dim() != 1 or len(each) % 2:
            raise ValueError(
                f"{each.dtype} of shape {tuple(each.shape)}: not 16-bit items as bytes"
            )
    if len(new) != len(base):
        raise ValueError(f"{len(new)} bytes against a base of {len(base)}")


def _header(like: Tensor, *fields: int) -> Tensor:
    kind, changed, wide = fields
    numbers = torch.tensor([kind, len(like) // 2, changed, wide], dtype=torch.int64)
    return numbers.view(torch.uint8).to(like.device)


def _parse_header(encoded: Tensor, base: Tensor) -> tuple[int, int, int]:
    if encoded.dtype != torch.uint8 or encoded.dim() != 1 or len(encoded) < HEADER_BYTES:
        raise MalformedMessage(f"delta: {tuple(encoded.shape)} of {encoded.dtype} has no header")
    numbers: list[int] = encoded[:HEADER_BYTES].clone().view(torch.int64).tolist()
    kind, items, changed, wide = numbers
    if kind not in (FULL, BITMAP, GAPS):
        raise MalformedMessage(f"delta: unknown kind {kind}")
    if items != len(base) // 2:
        raise MalformedMessage(f"delta: of {items} items, the base has {len(base) // 2}")
    if not 0 <= wide <= changed <= items:
        raise MalformedMessage(f"delta: {wide} wide of {changed} changed of {items} items")
    return kind, changed, wide


def _bitmap(changed_N: Tensor) -> Tensor:
    """[N] bool -> [ceil(N / 8)] uint8, the first item in the lowest bit."""
    filled = torch.nn.functional.pad(changed_N, (0, -len(changed_N) % 8)).view(torch.uint8)
    table = filled.view(-1, 8)
    packed = table[:, 0].clone()
    for bit in range(1, 8):
        packed |= table[:, bit] << bit
    return packed


def _from_bitmap(packed: Tensor, num_changed: int, num_items: int) -> Tensor:
    if len(packed) != -(-num_items // 8):
        raise MalformedMessage(f"delta: a bitmap of {len(packed)} bytes for {num_items} items")
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    places_C = ((packed[:, None] >> bits) & 1).flatten().nonzero()[:, 0]
    if len(places_C) != num_changed or (num_changed and int(places_C[-1]) >= num_items):
        raise MalformedMessage(f"delta: the bitmap does not mark {num_changed} of the items")
    return places_C


def _gaps(places_C: Tensor) -> Tensor:
    """Returns the number of unchanged items before each changed one since the one before."""
    gaps_C = places_C.diff(prepend=places_C.new_full((1,), -1)) - 1
    ends_C = (gaps_C // _ESCAPE + 1).cumsum(0)
    num_bytes = int(ends_C[-1]) if len(ends_C) else 0
    packed = torch.full((num_bytes,), _ESCAPE, dtype=torch.uint8, device=places_C.device)
    packed[ends_C - 1] = (gaps_C % _ESCAPE).to(torch.uint8)
    return packed


def _from_gaps(packed: Tensor, num_changed: int, num_items: int) -> Tensor:
    # In int64, so that no sum of bytes can pass for a smaller place.
    ends = packed != _ESCAPE
    places_C = packed.cumsum(0, dtype=torch.int64)[ends]
    if len(places_C) != num_changed or (len(packed) and not bool(ends[-1])):
        raise MalformedMessage(f"delta: the gaps are not those of {num_changed} items")
    places_C += torch.arange(num_changed, device=packed.device)
    if num_changed and int(places_C[-1]) >= num_items:
        raise MalformedMessage(f"delta: a changed item {int(places_C[-1])} of {num_items}")
    return places_C
