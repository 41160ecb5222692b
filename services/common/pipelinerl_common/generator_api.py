"""The generator's HTTP contract: the JSON of every request and answer.

    POST /v1/chat/completions     CompletionRequest -> CompletionResponse
    POST /v1/cancel               CancelRequest -> CancelResponse
    POST /v1/score                ScoreRequest -> ScoreResponse
    POST /init_process_group      InitGroupRequest -> InitGroupResponse
    POST /request_weight_update   UpdateRequest -> UpdateResponse
    POST /drain                   -> DrainResponse
    GET  /weights                 -> WeightsResponse
    GET  /load                    -> LoadResponse
    GET  /health, /ready          -> HealthResponse, ReadyResponse
    any other status than 200     -> ErrorResponse

Requests refuse unknown fields, and the bounds are in the types. Answers may gain fields: clients
ignore those that they do not know.
"""

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelinerl_common.errors import Refused

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class UnknownManifest(Refused):
    """The update names a manifest that this generator has not received in its present group: send
    the update again, with the manifest. The error's `type` is this class's name.
    """


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class ChatMessage(_Request):
    """One message of a conversation, as in OpenAI's API."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class CompletionRequest(_Request):
    """OpenAI's chat completion request, or `prompt_token_ids` in place of `messages` for multi-turn
    conversations that are exact to the token.

    Example: {"prompt_token_ids": [5, 40, 41], "n": 2, "max_tokens": 64, "temperature": 0.7}.
    """

    model: str | None = None
    """Accepted for OpenAI clients; there is only one model."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """When unset, what the context leaves."""
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
    """Name under which /v1/cancel stops the request; the answer then holds what was sampled, with
    the finish reason "abort".
    """
    answer_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """The answer's first tokens, sampled before: sampling continues after them. Token ids,
    log-probabilities and versions of the choice are those of the new tokens, its text is that of
    the whole answer.
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


class TokenLogprob(_Answer):
    token: str
    logprob: float


class Logprobs(_Answer):
    content: list[TokenLogprob]


class ChoiceMessage(_Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """OpenAI's servers answer None for an empty text."""


class Choice(_Answer):
    """One sampled sequence.

    Example: token_ids [5, 9, 2] with token_logprobs [-0.1, -2.3, -0.4] and weight_versions
    [[6, 2], [7, 1]]: version 6 sampled two tokens, version 7 the last one.
    """

    index: int
    message: ChoiceMessage
    finish_reason: str
    """"stop", "length", or "abort" for a request that was stopped."""
    token_ids: list[int]
    token_logprobs: list[float]
    weight_versions: list[tuple[int, int]]
    """Runs [[version, num_tokens], ...] over `token_ids`."""
    logprobs: Logprobs | None = None


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, summed over the choices."""


class CompletionResponse(_Answer):
    """The `n` choices of a completion request, and the prompt as the model saw it."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[Choice]
    prompt_token_ids: list[int]
    usage: Usage


class CancelRequest(_Request):
    """A request to stop the completion request that was sent under `request_id`."""

    request_id: str


class CancelResponse(_Answer):
    """The answer to a cancel request."""

    found: bool
    """Whether the request was being decoded: its answer then follows at once, to its own caller."""


class ScoredSequence(_Request):
    """Token ids of one sequence, and the position from which they are scored."""

    token_ids: Annotated[list[TokenId], Field(min_length=2)]
    start: Annotated[int, Field(ge=1)]
    """First position that is scored; the first token has no probability of its own."""

    @model_validator(mode="after")
    def _inside(self) -> "ScoredSequence":
        if self.start >= len(self.token_ids):
            raise ValueError(f"start={self.start} is not below the {len(self.token_ids)} token ids")
        return self


class ScoreRequest(_Request):
    """A request for the log-probabilities of given tokens.

    Example: {"sequences": [{"token_ids": [5, 9, 2], "start": 1}], "temperature": 0.7}.
    """

    sequences: Annotated[list[ScoredSequence], Field(min_length=1, max_length=4096)]
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0


class ScoreResponse(_Answer):
    """Log-probabilities of the tokens from each sequence's `start` on.

    Example: {"logprobs": [[-2.3, -0.4]], "weight_version": 0}.
    """

    logprobs: list[list[float]]
    weight_version: int


class InitGroupRequest(_Request):
    """Join the weight-transfer group of `epoch`. The generator's worker i has rank
    `rank_offset` + i.

    Example: a generator of 2 workers joins with rank_offset 3 a group of world_size 5.
    """

    epoch: Annotated[int, Field(ge=1)]
    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    backend: Literal["nccl", "gloo"]
    timeout_s: Seconds


class InitGroupResponse(_Answer):
    """The group that the generator has joined, and the ranks of its workers there.

    Example: {"epoch": 4, "ranks": [3, 4]}.
    """

    epoch: int
    ranks: list[int]


class UpdateRequest(_Request):
    """Receive `version` in the group of `epoch`.

    The first update of an epoch carries the manifest; the later ones name it by its hash, which a
    generator that does not have the manifest refuses with UnknownManifest.
    Example: {"epoch": 4, "version": 7, "manifest_hash": "9f86d0...", "timeout_s": 120}.
    """

    epoch: Annotated[int, Field(ge=1)]
    version: Annotated[int, Field(ge=0)]
    manifest: dict[str, Any] | None = None
    """JSON form of pipelinerl_weights.manifest.Manifest, which checks it."""
    manifest_hash: str | None = None
    mode: Literal["staged", "inplace"] = "staged"
    kv_cache: Literal["keep", "recompute"] = "keep"
    allow_rollback: bool = False
    timeout_s: Seconds

    @model_validator(mode="after")
    def _one_manifest(self) -> "UpdateRequest":
        if (self.manifest is None) == (self.manifest_hash is None):
            raise ValueError("give either manifest or manifest_hash")
        return self


class UpdateResponse(_Answer):
    """A finished update.

    Example: version 7, checksum "00ff", pause_s 0.02, transfer_s 1.4, apply_s 0.6, num_running 96.
    """

    version: int
    checksum: str
    pause_s: float
    """Time during which decoding was paused."""
    transfer_s: float
    """From being ready for the first bucket to having the last."""
    apply_s: float
    """Loading, packing and copying into the model; `staged` does nearly all of it beside the
    decode, before the pause.
    """
    num_running: int
    """Sequences that were being decoded across the update."""


class DrainResponse(_Answer):
    """The answer to a drain: the generator accepts no further requests."""

    drained: bool
    """Whether all requests ended within the generator's drain time."""


class WeightsResponse(_Answer):
    """The weights that a generator serves, and the group that it receives new ones in.

    Example: version 7 with checksum "00ff" in epoch 4, with 2 workers and 96 running sequences.
    """

    version: int
    """-1 before the job's first update."""
    checksum: str | None
    """Checksum of the last update; None for weights that came from the folder."""
    epoch: int
    """Epoch of the group that this generator is a member of; 0 for none."""
    num_workers: int
    num_running: int
    updates_total: int
    update_failures_total: int
    draining: bool


class LoadResponse(_Answer):
    """A generator's present load, and sums from the start of its process: differences between two
    answers give exact means over the time between, for example of the running sequences.

    Example: 12 sequences decode, 3 wait for blocks, 40 % of 500192 tokens of KV cache are in use.
    """

    num_running: int
    num_waiting: int
    kv_usage: float | None
    """Share of the KV blocks in use, 0 to 1; None for an engine without blocks."""
    kv_tokens: int | None
    """Tokens that the KV cache holds; None for an engine without blocks."""
    kv_block_tokens: int | None
    """Tokens of one KV block; None for an engine without blocks."""
    preemptions_total: int
    steps_total: int
    """Decode steps that were timed: those that followed another one at once."""
    step_seconds_total: float
    """Time of these steps."""
    step_tokens_total: int
    """Tokens sampled in these steps."""
    prefill_tokens_total: int
    """Prompt tokens computed in these steps, without those found in the prefix cache."""
    running_seconds_total: float
    """`num_running`, integrated over time."""
    kv_usage_seconds_total: float
    """`kv_usage`, integrated over time."""


class HealthResponse(_Answer):
    """The generator's process answers, whether or not it has weights to serve."""

    status: str = "ok"


class ReadyResponse(_Answer):
    """The generator serves the weights of `version`."""

    version: int


class ErrorDetail(_Answer):
    """What went wrong; `type` is the name of the error's class."""

    message: str
    type: str = ""
    serving_version: int = -1
    """Version of the weights that remain in service."""


class ErrorResponse(_Answer):
    """The body of every status from 400 on.

    Example: {"error": {"message": "an update is running", "type": "Refused",
    "serving_version": 6}} with status 409.
    """

    error: ErrorDetail
