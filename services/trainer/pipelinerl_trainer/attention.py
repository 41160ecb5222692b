"""Attention over packed rows. Two implementations of one rule: no token attends outside its own
sequence.

`packed`              torch's scaled dot-product attention on the row's sequences, batched by
                      similar length: exact, on any device, also where several ranks share the row.
`flash_attention_2`   the varlen kernel, where there are a GPU and the flash-attn package.

The model's forward passes keyword arguments on to its attention; those of `attention_arguments`
mark the boundaries.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.sequence_parallel import ALONE, SequenceGroup

PACKED = "packed"
FLASH = "flash_attention_2"

_UNSUPPORTED = ("s_aux", "softcap")
"""Keyword arguments of attention variants that `packed` does not compute."""


def choose_attention(
    device: torch.device, dtype: torch.dtype, sequence: SequenceGroup = ALONE
) -> str:
    """Returns the fastest implementation for this device and element type."""
    if (
        sequence.size == 1
        and device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and is_flash_attn_2_available()
    ):
        return FLASH
    return PACKED


def attention_arguments(
    sequence_lengths: tuple[int, ...], device: torch.device, sequence: SequenceGroup = ALONE
) -> dict[str, Any]:
    """Returns the keyword arguments of the model's forward that mark the boundaries of a packed
    row's sequences: of the whole row, also where the model gets one rank's slice of it.
    """
    cumulative = torch.tensor((0, *sequence_lengths)).cumsum(0).to(device, torch.int32)
    longest = max(sequence_lengths)
    slots = length_buckets(sequence_lengths)
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
        # All indices are made here, once a row and on the host: a boolean mask in each layer would
        # make the host wait for the device at every one of them.
        "packed_slots": tuple(slots_NS.clamp(min=0).to(device) for slots_NS in slots),
        "packed_order_L": _places(slots).to(device),
        "packed_sequence": sequence,
    }


def length_buckets(sequence_lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns slots of the row, one [N, S] tensor per bucket of N sequences up to S long; -1 pads
    shorter sequences.

    Lengths in a bucket are within a factor of two, so at most half of a bucket is padding.
    Example: lengths (3, 9, 4) give [[0, 1, 2, -1], [12, 13, 14, 15]] and [[3, ..., 11]].
    """
    buckets: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length in sequence_lengths:
        buckets.setdefault((length - 1).bit_length(), []).append((start, length))
        start += length
    return tuple(_slots(members) for members in buckets.values())


def _slots(members: list[tuple[int, int]]) -> Tensor:
    starts_N1 = torch.tensor([[start] for start, _ in members])
    lengths_N1 = torch.tensor([[length] for _, length in members])
    offsets_S = torch.arange(int(lengths_N1.max()))
    return torch.where(offsets_S < lengths_N1, starts_N1 + offsets_S, -1)


def _places(slots: tuple[Tensor, ...]) -> Tensor:
    """Returns the place of each of the row's tokens among the slots of all buckets, padding
    included.
    """
    flat = torch.cat([slots_NS.flatten() for slots_NS in slots])
    used = (flat >= 0).nonzero().squeeze(1)
    places_L = torch.empty_like(used)
    places_L[flat[used]] = used
    return places_L


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence: query [1, heads, C, D], key and value
    [1, kv_heads, C, D] to [1, C, heads, D], for the C slots of the row that this rank has.

    Raises SettingsError for a model whose attention cannot be computed this way.
    """
    del attention_mask
    _check_supported(module, arguments)
    if not module.training:
        arguments["dropout"] = 0.0

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query[0], key[0], value[0], arguments)

    sequence: SequenceGroup = arguments["packed_sequence"]
    return sequence.attention(attend)(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ), None


def _attend(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attends on the whole row: query [L, heads, D], key and value [L, kv_heads, D] to
    [1, L, heads, D].
    """
    # No mask for the padding: it is behind a sequence's end, where no causal query looks.
    window: int | None = arguments.get("sliding_window")
    options: dict[str, Any] = {
        "dropout_p": arguments.get("dropout", 0.0),
        "scale": arguments.get("scaling"),
    }
    results = []
    for slots_NS in arguments["packed_slots"]:
        q, k, v = (_gather(each, slots_NS) for each in (query, key, value))
        if window and window < slots_NS.shape[1]:
            result = _attend_in_windows(q, k, v, window, **options)
        else:
            result = scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=query.shape[1] != key.shape[1], **options
            )
        results.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, arguments["packed_order_L"]).unsqueeze(0)


def _attend_in_windows(
    query: Tensor, key: Tensor, value: Tensor, window: int, **options: Any
) -> Tensor:
    """Attends from every position to itself and the `window` - 1 before it: [N, heads, S, D] and
    [N, kv_heads, S, D] to [N, heads, S, D].

    Blocks of `window` queries look at their own block of keys and the one before, so memory grows
    with S times the window instead of S times S.
    """
    num, heads, length, width = query.shape
    # Kernels that take a mask take no grouped heads.
    key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    blocks = -(-length // window)
    query, key, value = (
        pad(each, (0, 0, 0, blocks * window - length)).reshape(num, heads, blocks, window, width)
        for each in (query, key, value)
    )
    key, value = (torch.cat([_one_block_later(each), each], dim=3) for each in (key, value))
    mask = _window_mask(blocks, window, query.device)
    # [N, heads, B, W, D] to [N, B, heads, W, D]: the mask is the same for all heads.
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    result = scaled_dot_product_attention(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        attn_mask=mask.repeat(num, 1, 1, 1),
        **options,
    )
    result = result.reshape(num, blocks, heads, window, width).transpose(1, 2)
    return result.reshape(num, heads, blocks * window, width)[:, :, :length]


def _one_block_later(states: Tensor) -> Tensor:
    """[N, heads, B, W, D] with every block in the place of the next one, the first empty."""
    return pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _window_mask(blocks: int, window: int, device: torch.device) -> Tensor:
    """Returns which of its 2 W keys each query of a block may see: [B, 1, W, 2 W]."""
    queries_W1 = torch.arange(window, device=device)[:, None] + window
    keys_2W = torch.arange(2 * window, device=device)
    seen = (keys_2W <= queries_W1) & (keys_2W > queries_W1 - window)
    mask = seen.repeat(blocks, 1, 1, 1)
    mask[0] &= keys_2W >= window  # there is no block before the first
    return mask


def _check_supported(module: nn.Module, arguments: dict[str, Any]) -> None:
    name = type(module).__name__
    if "packed_slots" not in arguments:
        raise SettingsError(
            f"model.uri: {name} does not pass keyword arguments on, so packed sequences would mix: "
            "not supported"
        )
    unsupported = [key for key in _UNSUPPORTED if arguments.get(key) is not None]
    if unsupported:
        raise SettingsError(
            f"model.uri: {name} needs {', '.join(unsupported)}, which only flash-attn on a GPU "
            "computes"
        )


def _gather(states: Tensor, slots_NS: Tensor) -> Tensor:
    """[L, heads, D] -> [N, heads, S, D]."""
    picked = states.index_select(0, slots_NS.flatten())
    return picked.view(*slots_NS.shape, *states.shape[1:]).transpose(1, 2)


def register() -> None:
    """Makes `packed` known to transformers. Idempotent."""
    AttentionInterface.register(PACKED, packed_attention)
