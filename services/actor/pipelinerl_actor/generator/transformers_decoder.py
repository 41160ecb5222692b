"""Decodes with a Hugging Face model, one token at a time: caches, sampling and stopping in
TransformersModel, and the thread that runs it in DecodeLoop.

Round by round the thread takes every running sequence one token further. Between two rounds it runs
what else is due (a pause, a command), so that all sequences are at a token boundary then.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pipelinerl_actor.generator.engine import EngineCompletion, EngineOptions, Sampling
from pipelinerl_actor.generator.metrics import StepClock
from pipelinerl_common.errors import FatalError
from pipelinerl_common.types import VersionRun, merge_runs

_GREEDY_BELOW = 1e-5
_IDLE_S = 0.05

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class DecodedSequence:
    """One sequence under way. `cache` holds the keys and values of its first tokens; the missing
    ones are computed next.
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

    def completion(self) -> EngineCompletion:
        runs = merge_runs(VersionRun(version, 1) for version in self.versions)
        return EngineCompletion(
            self.text,
            tuple(self.token_ids),
            tuple(self.logprobs),
            runs,
            self.finish_reason or "length",
        )


Observer = Callable[[DecodedSequence, Tensor], None]
"""Receives a sequence and, before its next token is drawn, the log-probabilities [V] that it is
drawn from.
"""


class TransformersModel:
    """A model, its tokenizer, and how sequences are decoded with it."""

    def __init__(self, options: EngineOptions, observe: Observer | None = None) -> None:
        self.device = "cpu" if options.on_cpu else "cuda"
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        self.model = model.to(self.device).eval()
        if options.head_dtype == "float32":
            self._compute_logits_in_float32()
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._observe = observe
        ends = self.model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])

    def _compute_logits_in_float32(self) -> None:
        """Casts the head's weight for each product, so that updates unfinished find it as it is."""
        head = self.model.get_output_embeddings()

        def forward(hidden: Tensor) -> Tensor:
            return linear(
                hidden.float(),
                head.weight.float(),
                None if head.bias is None else head.bias.float(),
            )

        head.forward = forward

    def start(self, prompt: list[int], sampling: Sampling) -> DecodedSequence:
        generator = torch.Generator(self.device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        return DecodedSequence(prompt, sampling, generator)

    @torch.inference_mode()
    def step(self, sequence: DecodedSequence, version: int) -> None:
        """Samples one token. Keys and values that are not cached are computed with the present
        weights.
        """
        tokens = sequence.prompt + sequence.token_ids
        if sequence.cache is None:
            sequence.cache = DynamicCache(config=self.model.config)
        fresh = tokens[sequence.cache.get_seq_length() :]
        inputs = torch.tensor([fresh], device=self.device)
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
        inputs = torch.tensor([token_ids[:-1]], device=self.device)
        logits = (
            self.model(input_ids=inputs, use_cache=False).logits[0, start - 1 :].float()
            / temperature
        )
        targets = torch.tensor(token_ids[start:], device=self.device)
        scores: list[float] = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        return scores

    def _finish(self, sequence: DecodedSequence, token: int) -> None:
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
    """Log-probabilities that the token is drawn from: after temperature, then top-k, then top-p of
    the rest.
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


@dataclass(eq=False, slots=True)
class DecodeJob:
    """A sequence that a caller waits for."""

    sequence: DecodedSequence
    done: "Future[EngineCompletion]"
    stop: asyncio.Event | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def abort(self) -> None:
        self.sequence.finish_reason = "abort"
        self.end()

    def end(self) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(self.sequence.completion())


class DecodeLoop:
    """The decoding thread, and the queue of commands to it."""

    def __init__(
        self, model: TransformersModel, max_running: int, version: Callable[[], int]
    ) -> None:
        self._model = model
        self._max_running = max_running
        self._version = version
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: list[DecodeJob] = []
        self._waiting: list[DecodeJob] = []
        self._computations: list[Callable[[], None]] = []
        self._paused = False
        self._stopping = False
        self.clock = StepClock()
        self.fault: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, job: DecodeJob) -> None:
        self._commands.put(lambda: self._waiting.append(job))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the decoding thread between two tokens, during a pause too."""
        command, done = _answered(function)
        self._commands.put(command)
        return await asyncio.wrap_future(done)

    async def compute(self, function: Callable[[], Result]) -> Result:
        """Runs a `function` that uses the weights on the decoding thread, never during a pause."""
        command, done = _answered(function)
        self._commands.put(lambda: self._computations.append(command))
        return await asyncio.wrap_future(done)

    async def pause(self) -> None:
        def command() -> None:
            self._paused = True
            self.clock.interrupted()

        await self.call(command)

    def resume(self) -> None:
        def command() -> None:
            self._paused = False

        self._commands.put(command)

    async def advance(self, num_rounds: int) -> None:
        """During a pause: runs so many rounds, with all that was submitted before, and pauses."""

        def command() -> None:
            self._paused = False
            for _ in range(num_rounds):
                self._admit()
                self._round()
            self._paused = True
            self.clock.interrupted()

        await self.call(command)

    def drop_caches(self) -> None:
        for job in self._running:
            job.sequence.cache = None

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                self._admit()
                if not self._paused:
                    self._round()
        except Exception as error:  # noqa: BLE001 - `watch` raises it
            self.fault.set_result(f"{type(error).__name__}: {error}")
        # Whatever ended the thread: no caller must wait for a sequence that nothing decodes.
        for job in self._running + self._waiting:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(FatalError("decoding ended"))

    def _run_commands(self) -> None:
        """Runs all commands; waits for one for a moment when there is nothing else to do."""
        idle = self._paused or not (self._running or self._waiting or self._computations)
        try:
            self._commands.get(timeout=_IDLE_S if idle else 0)()
            while not self._stopping:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _admit(self) -> None:
        for job in self._waiting:
            if job.is_stopped:
                job.abort()
        self._waiting = [
            job for job in self._waiting if not job.done.cancelled() and not job.is_stopped
        ]
        while self._waiting and len(self._running) < self._max_running and not self._paused:
            self._running.append(self._waiting.pop(0))

    def _round(self) -> None:
        """Runs the waiting computations, then samples one token of every running sequence."""
        computations, self._computations = self._computations, []
        for command in computations:
            command()
        unfinished: list[DecodeJob] = []
        # Read once: all tokens of a round are sampled from the same weights.
        version = self._version()
        num_tokens = num_prefilled = 0
        for job in self._running:
            if job.done.cancelled():
                continue
            if job.is_stopped:
                job.abort()
                continue
            num_tokens += 1
            num_prefilled += len(job.sequence.prompt) if job.sequence.cache is None else 0
            self._model.step(job.sequence, version)
            if job.sequence.finish_reason is None:
                unfinished.append(job)
            else:
                job.end()
        if self._running:
            self.clock.stepped(
                num_running=len(unfinished),
                num_waiting=len(self._waiting),
                num_tokens=num_tokens,
                num_prefilled=num_prefilled,
            )
        self._running = unfinished


def _answered(function: Callable[[], Result]) -> tuple[Callable[[], None], "Future[Result]"]:
    """`function` as a command that resolves the future with its result or error."""
    done: Future[Result] = Future()

    def command() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    return command, done
