"""A generator that plays a part, with the tiny model's tokens."""

from pathlib import Path
from typing import Any

import aiohttp
from actor_fakes import FakeGenerator, answer_of
from aiohttp import web

from pipelinerl_actor.models.chat import Continuation
from pipelinerl_actor.models.tiny import END_ID, make_tokenizer
from pipelinerl_actor.rollout.generator_client import RolloutClient
from pipelinerl_actor.rollout.generators import Generators, TrajectoryClock
from pipelinerl_actor.rollout.metrics import RolloutMeter
from pipelinerl_actor.rollout.progress import Progress
from pipelinerl_actor.rollout.trajectory import Sampler, Trajectory
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Prompt, Task, TaskName
from pipelinerl_actor.tasks.guess_number import GuessNumber
from pipelinerl_common.metrics import Metrics
from pipelinerl_common.settings import SamplingSettings

TOKENIZER = make_tokenizer()


class Player(FakeGenerator):
    """Tokenises like a generator with the tiny model and answers with `lines`, one after the other."""

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
    return Trajectory(sampler, 0, 0, prompt, TrajectoryClock(30), Progress({0}))
