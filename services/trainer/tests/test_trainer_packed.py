"""Packed rows give what each sequence gives alone."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainer_fakes as fakes
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM

from pipelinerl_common.errors import MalformedMessage, SettingsError
from pipelinerl_trainer import attention
from pipelinerl_trainer.attention import (
    _attend_in_windows,
    attention_arguments,
    length_buckets,
    packed_attention,
)
from pipelinerl_trainer.model import PolicyModel, load_policy
from pipelinerl_trainer.packed import pack_row
from pipelinerl_trainer.scoring import LogitTransform, TokenHead

CPU = torch.device("cpu")


def alone(model: Qwen3ForCausalLM, sequence: fakes.Trajectory, temperature: float) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by the plainest means: whole softmax, one sequence,
    torch's own attention.
    """
    ids = torch.tensor([sequence.tokens])
    logits = model(input_ids=ids).logits[0, :-1].float() / temperature
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[sequence.num_prompt - 1 :]


def test_packed_logprobs_are_those_of_each_sequence_alone() -> None:
    sequences = fakes.trajectories(6)
    policy = PolicyModel(fakes.tiny_model(), with_value_head=False)
    row, _ = pack_row(fakes.pack(sequences, temperature=0.7), CPU)
    packed = policy(row).logprobs_T
    reference = fakes.tiny_model()
    reference.set_attn_implementation("eager")
    expected = torch.cat([alone(reference, sequence, 0.7) for sequence in sequences])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    first, second, other = fakes.trajectories(3)
    policy = PolicyModel(fakes.tiny_model(), with_value_head=False)
    with_second = policy(pack_row(fakes.pack([second, first]), CPU)[0]).logprobs_T[
        -first.num_sampled :
    ]
    with_other = policy(pack_row(fakes.pack([other, other, first]), CPU)[0]).logprobs_T[
        -first.num_sampled :
    ]
    torch.testing.assert_close(with_second, with_other, atol=1e-6, rtol=0)


def test_sliding_windows_are_kept() -> None:
    model = fakes.tiny_model(**fakes.SLIDING_WINDOWS)
    sequences = fakes.trajectories(5)
    row, _ = pack_row(fakes.pack(sequences), CPU)
    packed = PolicyModel(model, with_value_head=False)(row).logprobs_T
    model.set_attn_implementation("eager")
    expected = torch.cat([alone(model, sequence, 0.7) for sequence in sequences])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def test_row_columns_are_those_of_the_trained_tokens() -> None:
    sequences = fakes.trajectories(3)
    batch = dataclasses.replace(fakes.pack(sequences), sequence_weights=(1.0, 0.5, 0.0))
    row, columns = pack_row(batch, CPU)
    assert row.sequence_lengths == tuple(len(sequence.tokens) for sequence in sequences)
    assert len(row.input_ids_L) == sum(row.sequence_lengths)  # padding is cut off
    expected_positions = [position for length in row.sequence_lengths for position in range(length)]
    assert row.position_ids_L.tolist() == expected_positions
    assert row.targets_T.tolist() == [
        token for each in sequences for token in each.tokens[each.num_prompt :]
    ]
    old = [value for each in sequences for value in each.old_logprobs]
    torch.testing.assert_close(columns.old_logprobs_T, torch.tensor(old))
    expected_weights = [
        w
        for w, each in zip((1.0, 0.5, 0.0), sequences, strict=True)
        for _ in range(each.num_sampled)
    ]
    assert columns.weights_T.tolist() == expected_weights


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    batch = fakes.pack(fakes.trajectories(2))
    mask = np.ones_like(batch.loss_mask_L)
    row, _ = pack_row(dataclasses.replace(batch, loss_mask_L=mask), CPU)
    starts = {0, batch.sequence_lengths[0]}
    assert starts.isdisjoint(row.target_slots_T.tolist())
    assert len(row.target_slots_T) == sum(batch.sequence_lengths) - 2


def test_a_filler_row_has_no_loss_and_gives_every_weight_a_zero_gradient() -> None:
    policy = PolicyModel(fakes.tiny_model(), with_value_head=True)
    row, columns = pack_row(fakes.pack([], num_slots=0), CPU)
    scores = policy(row)
    assert len(scores.logprobs_T) == len(columns.advantages_T) == 0
    assert scores.values_T is not None
    (scores.logprobs_T.sum() + scores.values_T.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_lengths": (70,)}, "do not fit 64 slots"),
        ({"temperature": 0.0}, "temperature 0.0 is not above 0"),
    ],
)
def test_impossible_rows_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        pack_row(dataclasses.replace(fakes.pack(fakes.trajectories(1)), **change), CPU)  # type: ignore[arg-type]


def test_buckets_cover_every_slot_once() -> None:
    short, long = length_buckets((3, 9, 4))
    assert short.tolist() == [[0, 1, 2, -1], [12, 13, 14, 15]]
    assert long.tolist() == [list(range(3, 12))]


def test_chunked_scoring_equals_whole_scoring_with_its_gradients() -> None:
    torch.manual_seed(3)
    lm_head = torch.nn.Linear(5, 11, bias=False, dtype=torch.float64)
    hidden, targets = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 11, (7,))
    results = []
    for chunk_bytes in (1 << 20, 2 * 4 * 11):  # everything at once; two tokens at a time
        inputs = hidden.clone().requires_grad_()
        lm_head.zero_grad()
        logprobs, entropy = TokenHead(lm_head, LogitTransform(), chunk_bytes)(
            inputs, targets, 0.5, True
        )
        (logprobs.sum() - 0.3 * entropy.sum()).backward()
        assert inputs.grad is not None
        assert lm_head.weight.grad is not None
        results.append(
            (logprobs.detach(), entropy.detach(), inputs.grad, lm_head.weight.grad.clone())
        )
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_a_head_in_float32_is_exact_where_one_in_bfloat16_rounds() -> None:
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(32, 50, bias=True, dtype=torch.bfloat16)
    hidden, targets = (4 * torch.randn(20, 32)).bfloat16(), torch.randint(0, 50, (20,))
    weight, bias = lm_head.weight.detach().double(), lm_head.bias.detach().double()
    exact = (hidden.double() @ weight.T + bias).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    errors = {}
    for in_float32 in (False, True):
        inputs = hidden.clone().requires_grad_()
        head = TokenHead(lm_head, LogitTransform(), 3 * 4 * 50, in_float32=in_float32)
        logprobs, _ = head(inputs, targets, 1.0, False)
        logprobs.sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.dtype == torch.bfloat16
        errors[in_float32] = float((logprobs.detach().double() - exact).abs().max())
    assert errors[True] < 1e-5
    assert errors[False] > 1e-3


def test_the_job_s_head_dtype_reaches_the_model(tmp_path: Path) -> None:
    fakes.save_tiny_model(tmp_path)
    row, _ = pack_row(fakes.pack(fakes.trajectories(4)), CPU)
    logprobs = {}
    for head_dtype in ("model", "float32"):
        spec = fakes.job(model={"dtype": "bfloat16", "headDtype": head_dtype}).spec
        policy = load_policy(tmp_path, spec, CPU)
        assert policy.language_model.get_output_embeddings().weight.dtype == torch.bfloat16
        logprobs[head_dtype] = policy(row).logprobs_T
    assert 1e-4 < float((logprobs["model"] - logprobs["float32"]).detach().abs().max()) < 0.1


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most elements that any tensor of an operation had, backward and recomputation
    included.
    """

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_logits_of_all_tokens_never_exist_at_once(entropy_gradient: bool) -> None:
    num_tokens, vocabulary, chunk = 64, 500, 4
    lm_head = torch.nn.Linear(8, vocabulary, bias=False)
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    largest = {}
    for name, chunk_bytes in (("whole", 1 << 20), ("chunked", 4 * vocabulary * chunk)):
        with LargestTensor() as mode:  # type: ignore[no-untyped-call]
            logprobs, entropy = TokenHead(lm_head, LogitTransform(), chunk_bytes)(
                hidden, targets, 1.0, entropy_gradient
            )
            (logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)).backward()
        largest[name] = mode.num_elements
    assert largest["whole"] == num_tokens * vocabulary
    assert largest["chunked"] == max(
        chunk * vocabulary, vocabulary * 8
    )  # the latter is the head's own gradient


def test_logprobs_and_entropy_are_of_the_tempered_distribution() -> None:
    lm_head = torch.nn.Linear(2, 2, bias=False)
    lm_head.weight.data = torch.eye(2)
    hidden = torch.tensor([[float(np.log(4.0)), 0.0]])
    logprobs, entropy = TokenHead(lm_head, LogitTransform())(hidden, torch.tensor([0]), 2.0, False)
    # Logits (log 4, 0) at temperature 2 are (log 2, 0): probabilities 2/3 and 1/3.
    assert logprobs.tolist() == pytest.approx([np.log(2 / 3)])
    assert entropy.tolist() == pytest.approx([-(2 / 3) * np.log(2 / 3) - (1 / 3) * np.log(1 / 3)])
    assert not entropy.requires_grad


def test_logit_transforms_of_known_configurations() -> None:
    class Granite:
        logits_scaling = 8.0

    class Gemma:
        final_logit_softcapping = 30.0

    assert LogitTransform.of(Granite()).scale == 0.125
    capped = LogitTransform.of(Gemma())(torch.tensor([1000.0, 0.0]))
    assert capped.tolist() == pytest.approx([30.0, 0.0])


def test_attention_that_would_mix_sequences_is_refused() -> None:
    heads = torch.zeros(1, 1, 2, 2)
    with pytest.raises(SettingsError, match="packed sequences would mix"):
        attention.packed_attention(torch.nn.Identity(), heads, heads, heads, None)
    arguments = attention.attention_arguments((2,), CPU)
    with pytest.raises(SettingsError, match="softcap"):
        attention.packed_attention(
            torch.nn.Identity(), heads, heads, heads, None, softcap=50.0, **arguments
        )


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations for which a host waits for its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        indices = args[1] if func.overloadpacket is torch.ops.aten.index and len(args) > 1 else ()
        by_mask = any(each is not None and each.dtype is torch.bool for each in indices)
        if by_mask or func.overloadpacket in (
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten._local_scalar_dense,
        ):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 3])
def test_no_layer_makes_the_host_wait(window: int | None) -> None:
    row = attention_arguments((3, 9, 4), torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    module = torch.nn.Identity()
    with HostWaits() as waits:
        result, _ = packed_attention(module, query, key, value, None, sliding_window=window, **row)
        result.sum().backward()  # type: ignore[no-untyped-call]
    assert waits.found == []


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("lengths", [(3, 9, 4), (1,), (33, 1, 2, 17)])
def test_the_varlen_kernel_gets_what_buckets_compute(
    window: int | None, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 8, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    arguments = {**attention_arguments(lengths, CPU), "sliding_window": window, "scaling": 0.3}
    assert arguments["packed_kernel"] is None  # there is no such kernel on a CPU
    results = []
    for kernel in (None, fakes.varlen_kernel):
        arguments["packed_kernel"] = kernel
        result, _ = packed_attention(torch.nn.Identity(), query, key, value, None, **arguments)
        weights = torch.linspace(-1, 1, result.numel()).view_as(result)
        results.append(
            (result, *torch.autograd.grad((result * weights).sum(), (query, key, value)))
        )
    for buckets, varlen in zip(*results, strict=True):
        torch.testing.assert_close(buckets, varlen, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((8, 8), torch.float32), ((12, 12), torch.bfloat16), ((16, 8), torch.bfloat16)],
)
def test_what_the_varlen_kernel_cannot_do_goes_by_buckets(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    query, key, value = (torch.randn(1, 2, 5, size).to(dtype) for size in (*heads[:1], *heads))
    arguments = attention_arguments((2, 3), CPU)
    expected, _ = packed_attention(torch.nn.Identity(), query, key, value, None, **arguments)
    arguments["packed_kernel"] = fakes.varlen_kernel
    result, _ = packed_attention(torch.nn.Identity(), query, key, value, None, **arguments)
    assert torch.equal(result, expected)


def test_the_head_is_cast_to_float32_once_a_row() -> None:
    class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and result.shape == (50, 32):
                self.count += result.dtype == torch.float32
            return result

    lm_head = torch.nn.Linear(32, 50, bias=False, dtype=torch.bfloat16)
    hidden, targets = torch.randn(20, 32).bfloat16().requires_grad_(), torch.arange(20)
    with Casts() as casts:  # type: ignore[no-untyped-call]
        head = TokenHead(lm_head, LogitTransform(), 3 * 4 * 50, in_float32=True)
        head(hidden, targets, 1.0, False)[0].sum().backward()
    assert casts.count == 1
    assert lm_head.weight.grad is not None


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [9, 10, 16])
def test_blocks_of_a_window_see_what_a_dense_mask_shows(window: int, length: int) -> None:
    query, key, value = (
        torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2)
    )
    at = torch.arange(length)
    distance = at[:, None] - at[None, :]
    dense = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=(distance >= 0) & (distance < window),
        enable_gqa=True,
    )
    torch.testing.assert_close(_attend_in_windows(query, key, value, window), dense)


def test_a_window_needs_no_square_of_the_length() -> None:
    """16,384 positions: a dense mask alone would have 268 million items."""
    query, key, value = (torch.zeros(1, 1, 16_384, 4) for _ in range(3))
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        _attend_in_windows(query, key, value, 64)
    assert largest.num_elements <= 2 * 64 * 16_384
