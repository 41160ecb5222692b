"""The cost model of the simulated hardware."""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_flag, check_number, check_optional_whole, check_whole


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Sizes and times of generators, trainer and the connection between them.

    The defaults are the article's machine: 8 GPUs, two of them generators with 500192 tokens of KV
    cache each (measured there). Its speeds are not published; these are fitted, together with the
    lengths, to its throughputs.
    """

    num_engines: int = 2
    kv_tokens: int = 500_192
    """KV cache of one engine, tokens."""
    max_sequences: int = 1024
    """Sequences decoded at once by one engine."""
    decode_step_s: float = 0.013
    """One decode step of an engine, whatever it holds, seconds."""
    decode_token_s: float = 6.2e-8
    """Seconds that every token of context in the engine adds to a decode step."""
    prefill_tokens_per_s: float = 6000.0
    """Prefill of one engine, which decodes nothing meanwhile."""
    publish_s: float = 8.0
    """Weights from trainer to engines; both pause meanwhile, unless `pause_s` is set."""
    train_tokens_per_s: float = 4500.0
    """Training, response tokens per second."""
    train_step_s: float = 0.0
    """Seconds that an optimizer step adds."""
    block_tokens: int = 16
    """Tokens of one KV block."""
    decode_sequence_s: float = 0.0
    """Seconds that every running sequence adds to a decode step."""
    pause_s: float | None = None
    """Pause of decoding at the end of a publish, seconds. If set, the rest of `publish_s` overlaps
    with decoding and training, as in PipelineRL; with None both pause for all of it, as in the
    article.
    """
    keeps_kv: bool | None = None
    """Whether running sequences keep their KV cache at a publish; None: as the policy's own
    framework does.
    """
    train_gap_s: float = 0.0
    """Seconds from the end of an optimizer step to the trainer's request for the next batch."""
    request_s: float = 0.0
    """Seconds that a request takes beside its decoding, half before and half after it; its slot at
    the generator is held meanwhile.
    """
    finish_s: float = 0.0
    """Seconds from a group's last token until it can be taken: verification and transport."""
    max_leased: int | None = None
    """Most leased and unfinished trajectories at which one more group is leased; None: whatever the
    policy admits.
    """

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_sequences", "block_tokens"):
            check_whole(name, getattr(self, name), 1)
        check_whole("kv_tokens", self.kv_tokens, self.block_tokens)
        check_optional_whole("max_leased", self.max_leased, 1)
        for name in ("decode_step_s", "prefill_tokens_per_s", "train_tokens_per_s"):
            check_number(name, getattr(self, name), 0, above=True)
        for name in (
            "decode_token_s",
            "publish_s",
            "train_step_s",
            "decode_sequence_s",
            "train_gap_s",
            "request_s",
            "finish_s",
        ):
            check_number(name, getattr(self, name), 0)
        if self.keeps_kv is not None:
            check_flag("keeps_kv", self.keeps_kv)
        if self.pause_s is not None:
            check_number("pause_s", self.pause_s, 0)
            if self.pause_s > self.publish_s:
                raise ValueError(
                    f"pause_s={self.pause_s} must be at most publish_s={self.publish_s}"
                )
