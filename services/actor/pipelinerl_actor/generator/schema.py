"""Bodies of the HTTP interface. Unknown fields are refused; bounds are in the types."""

import time
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class CompletionRequest(Body):
    """OpenAI's chat completion, or `prompt_token_ids` in place of `messages` for multi-turn that is
    exact to the token.
    """

    model: str | None = None
    """Accepted for OpenAI clients; there is only one model."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Unset: what the context leaves."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """The choice of index i is sampled with `seed` + i."""
    logprobs: bool = False
    ignore_eos: bool = False
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name under which /v1/cancel stops it; the answer then holds what was sampled, with the finish
    reason "abort".
    """
    answer_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """The answer's first tokens, sampled before: it goes on behind them. Token ids,
    log-probabilities and versions of the choice are those of what is new, its text is that of the
    whole answer.
    """

    @model_validator(mode="after")
    def _one_answer(self) -> "CompletionRequest":
        if self.answer_token_ids is not None and (
            self.n != 1 or self.prompt_token_ids is None or self.stop_strings
        ):
            raise ValueError(
                "answer_token_ids goes with prompt_token_ids and n=1, and without stop"
            )
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> "CompletionRequest":
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise ValueError("give either messages or prompt_token_ids")
        if "" in self.stop_strings:
            raise ValueError("stop holds an empty string")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CancelRequest(Body):
    request_id: str


class CancelResponse(Body):
    found: bool
    """Whether it was under way: its answer follows at once, to whoever asked for it."""


class TokenLogprob(Body):
    token: str
    logprob: float


class Logprobs(Body):
    content: list[TokenLogprob]


class ChoiceMessage(Body):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(Body):
    index: int
    message: ChoiceMessage
    finish_reason: str
    token_ids: list[int]
    token_logprobs: list[float]
    weight_versions: list[tuple[int, int]]
    """Runs [[version, num_tokens], ...] over `token_ids`."""
    logprobs: Logprobs | None = None


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, summed over the choices."""


class CompletionResponse(Body):
    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[Choice]
    prompt_token_ids: list[int]
    usage: Usage


class ScoredSequence(Body):
    token_ids: Annotated[list[TokenId], Field(min_length=2)]
    start: Annotated[int, Field(ge=1)]
    """First position that is scored; the first token has no probability of its own."""

    @model_validator(mode="after")
    def _inside(self) -> "ScoredSequence":
        if self.start >= len(self.token_ids):
            raise ValueError(f"start={self.start} is not below the {len(self.token_ids)} token ids")
        return self


class ScoreRequest(Body):
    sequences: Annotated[list[ScoredSequence], Field(min_length=1, max_length=4096)]
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0


class ScoreResponse(Body):
    logprobs: list[list[float]]
    weight_version: int


class InitGroupRequest(Body):
    epoch: Annotated[int, Field(ge=1)]
    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    backend: Literal["nccl", "gloo"]
    timeout_s: Seconds


class InitGroupResponse(Body):
    epoch: int
    ranks: list[int]


class ManifestTensor(Body):
    name: str
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]


class ManifestBody(Body):
    tensors: list[ManifestTensor]
    bucket_bytes: int


class UpdateRequest(Body):
    epoch: Annotated[int, Field(ge=1)]
    version: Annotated[int, Field(ge=0)]
    manifest: ManifestBody
    mode: Literal["staged", "inplace"] = "staged"
    kv_cache: Literal["keep", "recompute"] = "keep"
    allow_rollback: bool = False
    timeout_s: Seconds


class UpdateResponse(Body):
    version: int
    checksum: str
    pause_s: float
    """Decoding stood still."""
    transfer_s: float
    """From being ready for the first bucket to having the last."""
    apply_s: float
    """Loading, packing and copying into the model; `staged` does nearly all of it beside the
    decode, before the pause.
    """
    num_running: int
    """Sequences that went on across the update."""


class WeightsResponse(Body):
    version: int
    """-1 before the job's first update."""
    checksum: str | None
    """Of the last update; None for weights that came from the folder."""
    epoch: int
    """Of the group that this generator is a member of; 0 for none."""
    num_workers: int
    num_running: int
    updates_total: int
    update_failures_total: int
    draining: bool


class LoadResponse(Body):
    """See pipelinerl_actor.generator.load.Load; totals count from the start of the process."""

    num_running: int
    num_waiting: int
    kv_usage: float | None
    kv_tokens: int | None
    kv_block_tokens: int | None
    preemptions_total: int
    steps_total: int
    step_seconds_total: float
    step_tokens_total: int
    prefill_tokens_total: int
    running_seconds_total: float
    kv_usage_seconds_total: float


class ErrorDetail(Body):
    message: str
    type: str
    serving_version: int
    """Of the weights that go on serving."""


class ErrorResponse(Body):
    error: ErrorDetail
