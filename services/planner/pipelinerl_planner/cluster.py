"""What the simulated hardware costs."""

from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Tokens of one KV block."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Generators, trainer and the way between them.

    The defaults are the article's machine: 8 GPUs, two of them generators with 500192 tokens of KV cache each (measured
    there). Its speeds are not published; these are fitted, together with the lengths, to its throughputs.
    """

    num_engines: int = 2
    kv_tokens: int = 500_192
    """KV cache of one engine, tokens."""
    max_sequences: int = 1024
    """Sequences decoded at once by one engine."""
    decode_step_s: float = 0.013
    """One decode step of an engine, whatever it holds, seconds."""
    decode_token_s: float = 6.2e-8
    """What every token of context in the engine adds to a decode step, seconds."""
    prefill_tokens_per_s: float = 6000.0
    """Prefill of one engine; decoding stands still meanwhile."""
    publish_s: float = 8.0
    """Weights from trainer to engines; both stand still meanwhile."""
    train_tokens_per_s: float = 4500.0
    """Training, response tokens per second."""
    train_step_s: float = 0.0
    """What an optimizer step costs on top, seconds."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("decode_step_s", "prefill_tokens_per_s", "train_tokens_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("decode_token_s", "publish_s", "train_step_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.kv_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens={self.kv_tokens} must be at least one block of {BLOCK_TOKENS}")
