"""What the simulated hardware costs."""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_flag, check_number, check_optional_whole, check_whole


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Generators, trainer and the way between them.

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
    """What every token of context in the engine adds to a decode step, seconds."""
    prefill_tokens_per_s: float = 6000.0
    """Prefill of one engine; decoding stands still meanwhile."""
    publish_s: float = 8.0
    """Weights from trainer to engines; both stand still meanwhile, unless `pause_s` is set."""
    train_tokens_per_s: float = 4500.0
    """Training, response tokens per second."""
    train_step_s: float = 0.0
    """What an optimizer step costs on top, seconds."""
    block_tokens: int = 16
    """Tokens of one KV block."""
    decode_sequence_s: float = 0.0
    """What every running sequence adds to a decode step, seconds."""
    pause_s: float | None = None
    """How long decoding stands still at the end of a publish, seconds. Set, the rest of `publish_s`
    is beside decoding and training, as in PipelineRL; None: both stand still for all of it, as in
    the article.
    """
    keeps_kv: bool | None = None
    """Whether running sequences keep their KV cache at a publish; None: as the policy's own
    framework does.
    """
    train_gap_s: float = 0.0
    """From the end of an optimizer step to the trainer's asking for the next batch, seconds."""
    request_s: float = 0.0
    """What a request takes beside its decoding, seconds, half of it before and half behind; its
    place at the generator is taken meanwhile.
    """
    finish_s: float = 0.0
    """From a group's last token to its being ready to be taken, seconds: verification and the way.
    """
    max_leased: int | None = None
    """Trajectories that are leased and unfinished at most when one more group is; None: what the
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
