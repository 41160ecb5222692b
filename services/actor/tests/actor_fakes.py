"""In-process fakes: a generator over real HTTP, an Admission service over real gRPC, and a Rollout
without a generator.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pipelinerl.v1 import admission_pb2 as pb
from pipelinerl.v1.admission_pb2_grpc import add_AdmissionServicer_to_server
from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.models.tiny import END_ID, make_tokenizer
from pipelinerl_actor.rollout.generator_client import RolloutClient
from pipelinerl_actor.rollout.generators import Generators, TrajectoryClock
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.progress import Progress
from pipelinerl_actor.rollout.trajectory import Sampler, Trajectory
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Message, Prompt, Task, TaskName, Turn, Verdict
from pipelinerl_actor.tasks.guess_number import GuessNumber
from pipelinerl_common import rpc
from pipelinerl_common.generator_api import LoadResponse
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.settings import SamplingSettings
from pipelinerl_common.types import FinishReason

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]

END = 2


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns once `condition()` is true; fails the test after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are of many kinds
            await asyncio.sleep(0.005)


def choice(
    index: int, text: str, *, version: int = 0, finish_reason: str = "stop", **changes: Any
) -> dict[str, Any]:
    """One choice that samples the characters of `text` and the end token, all by `version`."""
    token_ids = [*map(ord, text), END]
    fields = {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish_reason,
        "token_ids": token_ids,
        "token_logprobs": [-0.5] * len(token_ids),
        "weight_versions": [[version, len(token_ids)]],
    }
    return {**fields, **changes}


def completion(
    texts: list[str], *, prompt: list[int] | None = None, **changes: Any
) -> dict[str, Any]:
    return answer_of(
        [choice(index, text, **changes) for index, text in enumerate(texts)], prompt or [4, 9, 2, 5]
    )


def answer_of(choices: list[dict[str, Any]], prompt: list[int]) -> dict[str, Any]:
    """The generator's answer with these choices."""
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt)}
    return {"model": "fake", "choices": choices, "prompt_token_ids": prompt, "usage": usage}


class FakeGenerator:
    """Implements the generator's contract. `answer` decides what a request gets; by default each
    choice is "7".
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._requests_running: list[web.Request] = []
        self.num_running = 0
        self.most_sequences = 0
        self.num_sequences = 0
        self.num_cancelled = 0
        self.is_ready = True
        self.num_looks = 0
        """Requests of its readiness so far."""
        self.stopped: dict[str, asyncio.Event] = {}
        """By request id: set once /v1/cancel has named it."""
        self.kv_tokens = 64
        self.script: deque[Answer] = deque()
        """Answers to the next requests, before `answer` takes over."""
        self.answer: Answer = self.say

    async def say(self, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(completion(["7"] * body["n"], prompt=body.get("prompt_token_ids")))

    async def hang(self, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError(body)

    async def reset(self, body: dict[str, Any]) -> web.StreamResponse:
        """Breaks the connection without an answer."""
        transport = self._requests_running[-1].transport
        assert transport is not None, body
        transport.abort()
        await asyncio.Event().wait()
        raise AssertionError(body)

    async def linger(self, body: dict[str, Any]) -> web.StreamResponse:
        """Samples "ab", by versions 1 and 2, and then nothing until it is stopped; the first of
        several choices is done.
        """
        await self.stopped.setdefault(body["request_id"], asyncio.Event()).wait()
        fields: dict[str, Any] = {
            "token_ids": [97, 98],
            "token_logprobs": [-0.5, -0.25],
            "weight_versions": [[1, 1], [2, 1]],
        }
        unfinished = [
            choice(index, "ab", finish_reason="abort", **fields) for index in range(body["n"])
        ]
        done = [choice(0, "7", version=1)] if body["n"] > 1 else []
        return web.json_response(answer_of(done + unfinished[len(done) :], [4, 9, 2, 5]))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        request_id = (await request.json())["request_id"]
        found = request_id in self.stopped
        self.stopped.setdefault(request_id, asyncio.Event()).set()
        return web.json_response({"found": found})

    @staticmethod
    def status(status: int, message: str = "no", **headers: str) -> Answer:
        async def answer(body: dict[str, Any]) -> web.StreamResponse:
            error = {"error": {"message": message, "type": "test", "serving_version": 0}}
            return web.json_response(
                error,
                status=status,
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            )

        return answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self._requests_running.append(request)
        self.num_running += 1
        self.num_sequences += body["n"]
        self.most_sequences = max(self.most_sequences, self.num_sequences)
        try:
            return await (self.script.popleft() if self.script else self.answer)(body)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._requests_running.remove(request)
            self.num_running -= 1
            self.num_sequences -= body["n"]

    async def load(self, request: web.Request) -> web.StreamResponse:
        del request
        load = dict.fromkeys(LoadResponse.model_fields, 0)
        return web.json_response(
            load
            | {"num_running": self.num_sequences, "kv_usage": 0.25, "kv_tokens": self.kv_tokens}
            | {"steps_total": 3}
        )

    async def ready(self, request: web.Request) -> web.StreamResponse:
        del request
        self.num_looks += 1
        return web.Response(status=200 if self.is_ready else 503)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["FakeGenerator"]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_get("/load", self.load)
        app.router.add_get("/ready", self.ready)
        app.router.add_post("/v1/cancel", self.cancel)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class FakeAdmission:
    """Grants what is in `to_grant`, cancels what is in `to_cancel`, and records all reports."""

    def __init__(self, group_size: int = 4) -> None:
        self.group_size = group_size
        self.to_grant = 0
        self.to_cancel: list[str] = []
        self.partial: pb.PartialGroup | None = None
        """Given with the next leases."""
        self.max_trajectories: int | None = None
        self.done = False
        self.requests: list[pb.LeaseRequest] = []
        self.events: list[pb.GroupEvent] = []
        self.loads: list[pb.GeneratorLoad] = []
        self.num_granted = 0
        self.on_grant: Callable[[], None] = lambda: None

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:
        self.requests.append(request)
        with suppress(TimeoutError):
            await until(
                lambda: self.to_grant or self.to_cancel or self.done,
                request.wait_s if request.max_groups else 0,
            )
        cancelled, self.to_cancel = self.to_cancel, []
        num_groups = min(self.to_grant, request.max_groups)
        self.to_grant -= num_groups
        if num_groups:
            self.on_grant()
        return pb.LeaseResponse(
            leases=[self._lease() for _ in range(num_groups)],
            cancelled_lease_ids=cancelled,
            max_trajectories=self.max_trajectories,
            served_version=3,
            state=pb.RUN_STATE_DONE if self.done else pb.RUN_STATE_RUNNING,
        )

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        self.events.extend(request.events)
        self.loads.extend(request.loads)
        return pb.ReportResponse()

    def _lease(self) -> pb.GroupLease:
        number = self.num_granted
        self.num_granted += 1
        return pb.GroupLease(
            lease_id=f"lease-{number}",
            group_id=f"0-{number}",
            attempt=1,
            prompt_index=number,
            group_size=self.group_size,
            expires_in_s=60,
            partial=self.partial,
        )

    def outcomes(self, outcome: pb.GroupOutcome.ValueType) -> list[pb.GroupEvent]:
        return [event for event in self.events if event.outcome == outcome]

    @asynccontextmanager
    async def serving(
        self, listen: str = "127.0.0.1:0", token: str | None = None
    ) -> AsyncIterator[str]:
        service = rpc.RpcService(add_AdmissionServicer_to_server, self, "pipelinerl.v1.Admission")
        async with rpc.serve(listen, [service], token=token, grace_s=0.1) as server:
            yield server.address


TOKENIZER = make_tokenizer()


class ScriptedGenerator(FakeGenerator):
    """Tokenises like a generator with the tiny model and answers with `lines`, in order."""

    def __init__(self, lines: list[str], finish_reason: str = "stop") -> None:
        super().__init__()
        self.lines = lines
        self.finish_reason = finish_reason
        self.version = 0
        self.answer = self.play

    async def play(self, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body.get("prompt_token_ids") or TOKENIZER.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        line = self.lines.pop(0)
        sampled = TOKENIZER(line)["input_ids"] + ([END_ID] if self.finish_reason == "stop" else [])
        self.version += 1
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": line},
            "finish_reason": self.finish_reason,
            "token_ids": sampled,
            "token_logprobs": [-0.125] * len(sampled),
            "weight_versions": [[self.version // 2, len(sampled)]],
        }
        return web.json_response(answer_of([choice], prompt))


def trajectory(
    player: FakeGenerator,
    session: aiohttp.ClientSession,
    model_folder: Path,
    prompt: Prompt,
    task: Task | None = None,
) -> Trajectory:
    generators = Generators(
        [RolloutClient(player.url, session, None)],
        max_running=4,
        max_retries=1,
        meter=RolloutMeter(Metrics("actor", "test")),
    )
    verifier = Verifier(
        task or GuessNumber(seed=0), TaskName("", {}, 0), timeout_s=1, max_retries=0
    )
    sampler = Sampler(
        generators, SamplingSettings(max_tokens=8), verifier, Continuation(model_folder), seed=0
    )
    return Trajectory(sampler, Progress(pb.GroupLease(), {0}), prompt, 0, TrajectoryClock(30))


class ScriptedRollout:
    """A Rollout whose policy answers with `says`, in order."""

    def __init__(
        self,
        task: Task,
        says: Sequence[str],
        finish_reason: FinishReason = FinishReason.STOP,
        index: int = 0,
    ) -> None:
        self.prompt_index, self.sample_index, self.seed = index, 0, 0
        self.prompt = task.prompt(index)
        self.turns: list[Turn] = []
        self.received: list[Message] = []
        self._task = task
        self._says = list(says)
        self._finish_reason = finish_reason

    async def chat(self, messages: Sequence[Message]) -> Turn:
        self.received += messages
        self.turns.append(Turn(self._says[len(self.turns)], (), (), (), self._finish_reason))
        return self.turns[-1]

    async def complete(self, token_ids: Sequence[int]) -> Turn:
        raise NotImplementedError

    async def verify(self, turn: Turn) -> Verdict:
        outcome = self._task.verify(self.prompt, turn)
        return outcome if isinstance(outcome, Verdict) else await outcome
