"""A Hugging Face model decoded one token at a time: caches, sampling, stopping. No threads, no
weights transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pipelinerl_actor.generator.engine import Completion, Sampling
from pipelinerl_common.types import VersionRun

_GREEDY_BELOW = 1e-5


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence under way. `cache` holds the keys and values of its first tokens; what is
    missing is computed next.
    """

    prompt: list[int]
    sampling: Sampling
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: Any = None
    finish_reason: str | None = None
    text: str = ""

    def completion(self) -> Completion:
        runs: list[VersionRun] = []
        for version in self.versions:
            if runs and runs[-1].policy_version == version:
                runs[-1] = VersionRun(version, runs[-1].num_tokens + 1)
            else:
                runs.append(VersionRun(version, 1))
        return Completion(
            self.text,
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(runs),
            self.finish_reason or "length",
        )


Observer = Callable[[Sequence, Tensor], None]
"""Is shown a sequence and, before its next token is drawn, the log-probabilities [V] that it is
drawn from.
"""


class TransformersModel:
    """`model` and what is needed to decode with it."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        head_dtype: str,
        device: str = "cpu",
        observe: Observer | None = None,
    ) -> None:
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            .to(device)
            .eval()
        )
        if head_dtype == "float32":
            self._compute_logits_in_float32()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._device = device
        self._observe = observe
        ends = self.model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])

    def _compute_logits_in_float32(self) -> None:
        """The head's weight stays as it is, so that updates find it; it is cast for each product."""
        head = self.model.get_output_embeddings()

        def forward(hidden: Tensor) -> Tensor:
            return linear(
                hidden.float(),
                head.weight.float(),
                None if head.bias is None else head.bias.float(),
            )

        head.forward = forward

    def start(self, prompt: list[int], sampling: Sampling) -> Sequence:
        generator = torch.Generator(self._device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        return Sequence(prompt, sampling, generator)

    @torch.inference_mode()
    def step(self, sequence: Sequence, version: int) -> None:
        """Samples one token. Tokens whose keys and values are not cached are computed with the
        present weights.
        """
        tokens = sequence.prompt + sequence.token_ids
        if sequence.cache is None:
            sequence.cache = DynamicCache(config=self.model.config)
        fresh = tokens[sequence.cache.get_seq_length() :]
        inputs = torch.tensor([fresh], device=self._device)
        output = self.model(
            input_ids=inputs, past_key_values=sequence.cache, use_cache=True, logits_to_keep=1
        )
        logprobs_V = sampled_distribution(output.logits[0, -1].float(), sequence.sampling)
        if self._observe is not None:
            self._observe(sequence, logprobs_V)
        if sequence.sampling.temperature < _GREEDY_BELOW:
            token = int(logprobs_V.argmax())
        else:
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=sequence.generator))
        sequence.token_ids.append(token)
        sequence.logprobs.append(float(logprobs_V[token]))
        sequence.versions.append(version)
        self._finish(sequence, token)

    @torch.inference_mode()
    def score(self, token_ids: list[int], start: int, temperature: float) -> list[float]:
        inputs = torch.tensor([token_ids[:-1]], device=self._device)
        logits = (
            self.model(input_ids=inputs, use_cache=False).logits[0, start - 1 :].float()
            / temperature
        )
        targets = torch.tensor(token_ids[start:], device=self._device)
        scores: list[float] = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        return scores

    def _finish(self, sequence: Sequence, token: int) -> None:
        sampling = sequence.sampling
        ended = token in self._ends and not sampling.ignore_eos
        if sampling.stop or ended or len(sequence.token_ids) >= sampling.max_tokens:
            sequence.text = self._tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
        found = [at + len(stop) for stop in sampling.stop if (at := sequence.text.find(stop)) >= 0]
        if found:
            sequence.text = sequence.text[: min(found)]
        if ended or found:
            sequence.finish_reason = "stop"
        elif len(sequence.token_ids) >= sampling.max_tokens:
            sequence.finish_reason = "length"


def sampled_distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities that the token is drawn from: temperature, then top-k, then top-p of what
    is left.
    """
    if sampling.temperature >= _GREEDY_BELOW:
        logits_V = logits_V / sampling.temperature
        if 0 < sampling.top_k < len(logits_V):
            lowest = logits_V.topk(sampling.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < lowest, -torch.inf)
        if sampling.top_p < 1:
            ordered, order = logits_V.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            logits_V = logits_V.masked_fill((before >= sampling.top_p)[order.argsort()], -torch.inf)
    return logits_V.log_softmax(-1)
