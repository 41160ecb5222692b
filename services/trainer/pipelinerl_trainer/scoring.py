"""Log-probabilities, entropies and values of a row's trained tokens, computed without holding all
of their logits at once.

Shape suffixes: T trained tokens of a row, H hidden, V vocabulary. With a vocabulary of 150 000 the
logits of 4096 tokens are 2.5 GB in float32, twice that with their gradient; a chunk of tokens is
scored at a time and its logits are computed again in backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 << 20
"""Largest size of the float32 logits that exist at once."""


class TokenScores(NamedTuple):
    """The scores of a row's trained tokens: a tuple, so that DeepSpeed finds the tensors in it."""

    logprobs_T: Tensor
    """float32, under the distribution at the sampling temperature."""
    entropy_T: Tensor
    """float32, of that distribution; without gradient unless it was requested."""
    values_T: Tensor | None


class LogitTransform(NamedTuple):
    """The scale and cap that some models put on their logits, by transformers' names."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: object) -> "LogitTransform":
        scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits_TV: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        return (
            logits_TV
            if self.softcap is None
            else self.softcap * torch.tanh(logits_TV / self.softcap)
        )


class TokenHead(nn.Module):
    """Scores hidden states with a language model's head, which stays the language model's own
    submodule.

    `in_float32` computes the head's product in float32 from weights that stay in their element
    type; a float32 copy of them, made once per row, exists from forward to backward, and their
    gradient is added up in float32 over the chunks. Without it logits are rounded to the weights'
    type before the softmax.
    """

    def __init__(
        self,
        lm_head: nn.Linear,
        transform: LogitTransform,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        in_float32: bool = False,
    ) -> None:
        super().__init__()
        self._in_float32 = in_float32
        # A tuple hides the head from nn.Module, which would list its weight twice.
        self._lm_head = (lm_head,)
        self._transform = transform
        self._chunk_bytes = chunk_bytes

    @property
    def parameters_used(self) -> list[nn.Parameter]:
        """The parameters of another module that this one uses, which ZeRO-3 must gather for it."""
        return list(self._lm_head[0].parameters(recurse=False))

    def forward(
        self, hidden_TH: Tensor, targets_T: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of `targets_T` and entropies, both [T] float32, under
        softmax(logits / temperature).
        """
        weight_VH: Tensor = self._lm_head[0].weight
        bias_V: Tensor | None = self._lm_head[0].bias
        if self._in_float32:
            # Once per row: in a chunk it would be made twice, in forward and in recomputation.
            hidden_TH, weight_VH = hidden_TH.float(), weight_VH.float()
            bias_V = None if bias_V is None else bias_V.float()
        chunk_size = max(1, self._chunk_bytes // (4 * self._lm_head[0].out_features))
        arguments = (weight_VH, bias_V, temperature, entropy_gradient)
        if len(targets_T) <= chunk_size:
            return self._score(hidden_TH, targets_T, *arguments)
        scores = [
            checkpoint(
                self._score,
                hidden,
                targets,
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for hidden, targets in zip(
                torch.split(hidden_TH, chunk_size), torch.split(targets_T, chunk_size), strict=True
            )
        ]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self,
        hidden_TH: Tensor,
        targets_T: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logits_TV = self._transform(linear(hidden_TH, weight_VH, bias_V).float()) / temperature
        normalizer_T = logits_TV.logsumexp(-1)
        logprobs_T = logits_TV.gather(-1, targets_T[:, None])[:, 0] - normalizer_T
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities_TV = torch.softmax(logits_TV, -1)
            entropy_T = normalizer_T - (probabilities_TV * logits_TV).sum(-1)
        return logprobs_T, entropy_T
