"""Attention over packed rows. One rule: no token attends outside its own sequence.

`packed`              the row's sequences in torch's varlen kernel on a GPU that has it, else in
                      its scaled dot-product attention, batched by similar length: exact, on any
                      device, also where several ranks share the row.
`flash_attention_2`   the flash-attn package, for models whose attention torch's kernels do not
                      compute: those that cap their attention logits.

The model's forward passes keyword arguments on to its attention; those of `attention_arguments`
mark the boundaries.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from pipelinerl_common.errors import SettingsError
from pipelinerl_trainer.sequence_parallel import ALONE, SequenceGroup

log = logging.getLogger(__name__)

PACKED = "packed"
FLASH = "flash_attention_2"

_UNSUPPORTED = ("s_aux", "softcap")
"""Keyword arguments of attention variants that `packed` does not compute."""


HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
"""Bound of the flash kernels' head size, which must be a multiple of 8 as well."""


VarlenKernel = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn: query [L, heads, D], key and value [L, kv_heads, D],
boundaries of the sequences and the longest of them, for queries and for keys, and the keywords
`scale`, `window_size` and `enable_gqa` to [L, heads, D].
"""


def choose_attention(
    device: torch.device, dtype: torch.dtype, config: Any, sequence: SequenceGroup = ALONE
) -> str:
    """Returns transformers' name of the attention for a model of this configuration, and logs
    which kernel computes it.
    """
    on_gpu = device.type == "cuda" and dtype in HALVES
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and on_gpu and sequence.size == 1 and is_flash_attn_2_available():
        name, kernel = FLASH, "the flash-attn package"
    elif on_gpu and varlen_kernel(device) is not None:
        name, kernel = PACKED, "torch's varlen kernel"
    else:
        name, kernel = PACKED, "torch's scaled dot-product attention, by length"
    log.info("attention of packed rows: %s, %s on %s", kernel, dtype, device)
    return name


@cache
def varlen_kernel(device: torch.device) -> VarlenKernel | None:
    """Returns torch's varlen kernel, or None where the device has none: it needs a GPU of
    compute capability 8.0 (A100) and a build of torch with flash attention.
    """
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    from torch.nn.attention import varlen

    # It logs a line for every call, so for every layer.
    logging.getLogger(varlen.__name__).setLevel(logging.WARNING)
    kernel: VarlenKernel = varlen.varlen_attn
    return kernel


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
        "packed_kernel": varlen_kernel(device),
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
    kernel: VarlenKernel | None = arguments["packed_kernel"]
    if kernel is not None and _suits_varlen(query, value, arguments):
        return _attend_varlen(kernel, query, key, value, arguments)
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


def _suits_varlen(query: Tensor, value: Tensor, arguments: dict[str, Any]) -> bool:
    size = query.shape[-1]
    return (
        query.dtype in HALVES
        and size % 8 == 0
        and size <= _LARGEST_HEAD
        and value.shape[-1] == size
        and not arguments.get("dropout", 0.0)
    )


def _attend_varlen(
    kernel: VarlenKernel, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> Tensor:
    window: int | None = arguments.get("sliding_window")
    result: Tensor = kernel(
        query,
        key,
        value,
        arguments["cu_seq_lens_q"],
        arguments["cu_seq_lens_k"],
        arguments["max_length_q"],
        arguments["max_length_k"],
        scale=arguments.get("scaling"),
        # The kernel's window is the number of keys before the query's own; transformers' has
        # that one too.
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result.unsqueeze(0)


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
