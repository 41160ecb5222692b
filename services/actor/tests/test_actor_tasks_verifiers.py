"""Environments of `verifiers`: what is sampled here is judged as it would be there, and what cannot
be run is refused.
"""

import asyncio
import importlib
import json
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from actor_fakes import TOKENIZER, ScriptedGenerator, ScriptedRollout, trajectory
from aiohttp import web

from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Prompt, Task, TaskName, Turn, Verdict
from pipelinerl_actor.task_loader import load_task
from pipelinerl_actor.tasks.verifiers.episode import completion_of, plain
from pipelinerl_common.errors import PermanentError, SettingsError, TemporaryError
from pipelinerl_common.types import FinishReason

verifiers = pytest.importorskip("verifiers")

PATH = "pipelinerl_actor.tasks.verifiers:environment"

ENVIRONMENTS = '''
import random
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

SUMS = Dataset.from_list([
    {
        "question": f"{n} + {n}?",
        "answer": str(2 * n),
        "info": {"n": n, "note": "even" if n % 2 == 0 else "odd"},
    }
    for n in range(6)
])

def right(parser, completion, answer):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0

async def brief(completion):
    return 1.0 / len(completion[-1]["content"])

def even(info):
    return float(info["note"] == "even")

def number(completion):
    return float(completion[-1]["content"])

def single(weight=2.0, **fields):
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[right, brief, even], weights=[weight, 0.5, 0.0], parser=parser)
    shots = [
        {"role": "user", "content": "0 + 1?"},
        {"role": "assistant", "content": "<answer>1</answer>"},
    ]
    return vf.SingleTurnEnv(
        dataset=SUMS, system_prompt="Add.", few_shot=shots, parser=parser, rubric=rubric, **fields
    )

class Guess(vf.MultiTurnEnv):
    cleaned = 0
    async def setup_state(self, state):
        state["number"], state["guesses"] = int(state["answer"]), 0
        return state
    @vf.stop
    async def found(self, state):
        if not state["trajectory"]:
            return False
        return state["trajectory"][-1]["completion"][-1]["content"] == str(state["number"])
    @vf.cleanup
    async def clean(self, state):
        type(self).cleaned += 1
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        state["guesses"] += 1
        if said == "away":
            raise vf.SandboxError("the sandbox is unreachable")
        if said == "enough":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return state["final_env_response"]
        if said == "rewrite":
            messages[0]["content"] = "something else"
            return [{"role": "user", "content": "again"}]
        if said == "show":
            image = {"type": "image_url", "image_url": {"url": "data:"}}
            return [{"role": "user", "content": [image]}]
        hint = "higher" if int(said) < state["number"] else "lower"
        return [{"role": "user", "content": [{"type": "text", "text": hint}]}]

async def quickly(state):
    return 1.0 / (1 + state["guesses"])

def guess(max_turns=4):
    rubric = vf.RubricGroup([vf.Rubric(funcs=[quickly]), vf.Rubric(funcs=[brief], weights=[0.1])])
    return Guess(dataset=SUMS, rubric=rubric, max_turns=max_turns)

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def tools(stop=False):
    rubric = vf.Rubric(funcs=[lambda_right])
    stops = [TypeError] if stop else []
    return vf.ToolEnv(dataset=SUMS, tools=[add], rubric=rubric, max_turns=3, stop_errors=stops)

def lambda_right(completion, answer):
    return float(completion[-1]["content"] == answer)

def judge(url, key="none"):
    rubric = vf.JudgeRubric(judge_client=AsyncOpenAI(base_url=url, api_key=key, max_retries=0))
    async def judged(judge, prompt, completion, answer, state):
        return float("yes" in await judge(prompt, completion, answer, state))
    rubric.add_reward_func(judged)
    return vf.SingleTurnEnv(dataset=SUMS, rubric=rubric)

class OwnRollout(vf.Environment):
    async def rollout(self, *args, **kwargs):
        raise NotImplementedError

class OwnResponse(vf.SingleTurnEnv):
    async def get_model_response(self, *args, **kwargs):
        raise NotImplementedError

def drawn():
    rows = [{"question": str(random.random()), "answer": ""} for _ in range(3)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows))

def away():
    raise ConnectionError("Couldn't reach the hub")

KINDS = {
    "single": single, "guess": guess, "tools": tools, "judge": judge, "drawn": drawn, "away": away,
    "number": lambda: vf.SingleTurnEnv(dataset=SUMS, rubric=vf.Rubric(funcs=[number])),
    "keyless": lambda: vf.SingleTurnEnv(dataset=SUMS, rubric=vf.JudgeRubric()),
    "group": lambda: vf.EnvGroup([single(), guess()], env_names=["single", "guess"]),
    "grouped": lambda: vf.SingleTurnEnv(dataset=SUMS, rubric=vf.Rubric(funcs=[compared])),
    "own_rollout": lambda: OwnRollout(dataset=SUMS),
    "own_response": lambda: OwnResponse(dataset=SUMS),
    "text": lambda: vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"prompt": "1 + 1 =", "answer": "2"}]), message_type="completion"
    ),
    "empty": lambda: vf.SingleTurnEnv(dataset=SUMS.select([])),
    "only_eval": lambda: vf.SingleTurnEnv(eval_dataset=SUMS),
}

def compared(completions):
    return [0.0 for _ in completions]

def load_environment(kind, **arguments):
    return KINDS[kind](**arguments)
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_env.py").write_text(ENVIRONMENTS)
    (tmp_path / "our_needy_env.py").write_text("import no_such_package_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def args_of(kind: str, **arguments: object) -> dict[str, Any]:
    return {"name": "our-env", "arguments": {"kind": kind, **arguments}}


def load(kind: str, seed: int = 7, split: str = "train", **arguments: object) -> Task:
    return load_task(TaskName(PATH, {**args_of(kind, **arguments), "split": split}, seed))


def turn(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Turn:
    return Turn(text, (1, 2), (-0.5, -0.5), (), finish_reason)


class Endpoint:
    """The policy's endpoint as `verifiers` itself would ask it: says `says` in turn, as OpenAI's
    API would.
    """

    def __init__(self, says: Sequence[str]) -> None:
        self._says = list(says)
        self.received: list[Any] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: Any, **_: Any) -> Any:
        self.received = list(messages)
        number = sum(message["role"] == "assistant" for message in messages)
        return completion_of(turn(self._says.pop(0)), number)


async def theirs(
    kind: str, row: Mapping[str, Any], says: Sequence[str], **arguments: object
) -> tuple[float, dict[str, float]]:
    """Reward and metrics of `verifiers`' own rollout and scoring."""
    kept = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    environment = verifiers.load_environment("our-env", kind=kind, **arguments)
    signal.signal(signal.SIGINT, kept[0])
    signal.signal(signal.SIGTERM, kept[1])
    state = await environment.rollout(dict(row), Endpoint(says), "policy", {})
    rubric = environment.rubric
    if isinstance(environment, verifiers.EnvGroup):
        rubric = environment.get_env_for_task(row["task"]).rubric
    await rubric.score_rollout(state)
    return state["reward"], state["metrics"]


def ours(verdict: Verdict) -> tuple[float, dict[str, float]]:
    metrics = {name: value for name, value in verdict.metrics.items() if name != "reward_errors"}
    return verdict.reward, metrics


def index_of(task: Task, n: int) -> int:
    """Index of the prompt that is about `n`."""
    return next(index for index in range(6) if task.prompt(index).facts["row"]["info"]["n"] == n)


async def play(task: Task, n: int, says: Sequence[str]) -> tuple[Verdict, ScriptedRollout]:
    script = ScriptedRollout(task, says, index=index_of(task, n))
    return await task.rollout(script), script


async def judged(task: Task, prompt: Prompt, text: str) -> Verdict:
    """In a thread, which has no loop of its own, as a verifier's process has none."""
    verdict = await asyncio.to_thread(task.verify, prompt, turn(text))
    assert isinstance(verdict, Verdict)
    return verdict


@asynccontextmanager
async def judging(kind: str, **arguments: object) -> AsyncIterator[tuple[Task, Verifier]]:
    """The task with a verifier's process, as the actor runs them."""
    name = TaskName(PATH, args_of(kind, **arguments), 7)
    task = load_task(name)
    verifier = Verifier(task, name, timeout_s=60, max_retries=0, num_processes=1)
    try:
        yield task, verifier
    finally:
        await verifier.close()


async def test_one_answer_is_judged_in_a_process_as_verifiers_judges_it() -> None:
    async with judging("single", weight=3.0) as (task, verifier):
        index = index_of(task, 4)
        prompt = task.prompt(index)
        for text in ("I think <answer>8</answer>", "<answer>9</answer>", "8"):
            verdict = await verifier.verify(index, prompt, turn(text))
            assert ours(verdict) == await theirs("single", prompt.facts["row"], [text], weight=3.0)
            assert verdict.metrics["reward_errors"] == 0
        assert verdict.metrics.keys() == {"right", "brief", "even", "num_turns", "reward_errors"}
        assert (
            await verifier.verify(index, prompt, turn("<answer>8</answer>"))
        ).reward == 3.0 + 0.5 / 18


def test_system_prompt_and_examples_come_before_the_question() -> None:
    task = load("single")
    assert [
        (each["role"], each["content"]) for each in task.prompt(index_of(task, 4)).messages
    ] == [
        ("system", "Add."),
        ("user", "0 + 1?"),
        ("assistant", "<answer>1</answer>"),
        ("user", "4 + 4?"),
    ]


def test_prompts_follow_from_the_seed_and_every_epoch_holds_each_row_once() -> None:
    task = load("single")
    order = [task.prompt(index).facts["row"]["info"]["n"] for index in range(18)]
    epochs = [order[:6], order[6:12], order[12:]]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again, other = load("single"), load("single", seed=8)
    assert [again.prompt(index) for index in range(18)] == [
        task.prompt(index) for index in range(18)
    ]
    assert [other.prompt(index) for index in range(18)] != [
        task.prompt(index) for index in range(18)
    ]


def test_what_an_environment_draws_at_random_is_the_same_in_every_process() -> None:
    assert load("drawn").prompt(0) == load("drawn").prompt(0)
    assert load("drawn", seed=8).prompt(0) != load("drawn").prompt(0)


async def test_several_turns_are_played_and_judged_as_verifiers_does_it() -> None:
    task = load("guess")
    for says in (["4", "9", "8"], ["1", "1", "1", "1"], ["5", "enough"], ["8"]):
        verdict, script = await play(task, 4, says)
        assert ours(verdict) == await theirs("guess", script.prompt.facts["row"], says)
    verdict, script = await play(task, 4, ["4", "9", "8"])
    assert verdict.reward == pytest.approx(1 / 3 + 0.1)
    assert verdict.metrics["num_turns"] == 3
    assert [message["content"] for message in script.received] == ["4 + 4?", "higher", "lower"]


async def test_the_tokens_of_several_turns_are_the_sampled_ones(tmp_path: Path) -> None:
    task = load("guess")
    prompt = task.prompt(index_of(task, 4))
    model = make_tiny_model(tmp_path, hidden_size=32, num_layers=1)
    async with (
        ScriptedGenerator(["4", "9", "8"]).serving() as generator,
        aiohttp.ClientSession() as session,
    ):
        rollout = trajectory(generator, session, model, prompt, task)
        verdict = await task.rollout(rollout)
    assert ours(verdict) == await theirs("guess", prompt.facts["row"], ["4", "9", "8"])
    sample = rollout.record.to_sample(0, verdict)
    asked = (
        "<|user|>4 + 4?<|end|><|assistant|>",
        "<|user|>higher<|end|><|assistant|>",
        "<|user|>lower<|end|><|assistant|>",
    )
    said = ("4<|end|>", "9<|end|>", "8<|end|>")
    spoken = "".join(part for pair in zip(asked, said, strict=True) for part in pair)
    assert TOKENIZER.decode(sample.token_ids_S.tolist()) == spoken
    assert (sample.segment_lengths[1::2], len(sample.logprobs_T)) == ((2, 2, 2), 6)


async def test_tools_are_told_called_and_their_results_told_as_verifiers_does_it() -> None:
    task = load("tools")
    call = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 4}}</tool_call>'
    broken = call.replace('"b": 4', '"c": 4')
    for says in (
        [f"Let me see. {call}", "8"],
        [call + call, "8"],
        [broken, "8"],
        [call] * 3,
        ["<tool_call>{</tool_call>"],
    ):
        verdict, script = await play(task, 4, says)
        assert ours(verdict) == await theirs("tools", script.prompt.facts["row"], says)
    verdict, script = await play(task, 4, [f"Let me see. {call}", "8"])
    assert (verdict.reward, verdict.metrics["total_tool_calls"], verdict.metrics["add_calls"]) == (
        1.0,
        1.0,
        1.0,
    )
    system, question, result = script.received
    assert "- add: Adds two numbers." in system["content"]
    assert '"required": ["a", "b"]' in system["content"]
    assert (question["content"], result) == ("4 + 4?", {"role": "tool", "content": "8"})
    assert tuple(script.received[:2]) == task.prompt(index_of(task, 4)).messages


async def test_a_tool_error_that_ends_the_rollout_is_the_policys_and_is_scored() -> None:
    says = ['<tool_call>{"name": "add", "arguments": {"c": 4}}</tool_call>']
    verdict, script = await play(load("tools", stop=True), 4, says)
    assert ours(verdict) == await theirs("tools", script.prompt.facts["row"], says, stop=True)
    assert verdict.reward == 0.0


async def test_rows_of_a_group_are_played_by_their_own_environment() -> None:
    task = load("group")
    by_task = {task.prompt(index).facts["row"]["task"]: index for index in range(12)}
    for name, says in (("single", ["<answer>8</answer>"]), ("guess", ["1", "2", "3", "4"])):
        script = ScriptedRollout(task, says, index=by_task[name])
        assert ours(await task.rollout(script)) == await theirs(
            "group", script.prompt.facts["row"], says
        )


async def test_a_reward_function_that_raises_counts_as_0_and_is_counted() -> None:
    task = load("number")
    prompt = task.prompt(0)
    assert (await judged(task, prompt, "0.5")).metrics["reward_errors"] == 0
    verdict = await judged(task, prompt, "none")
    assert ours(verdict) == await theirs("number", prompt.facts["row"], ["none"])
    assert (verdict.reward, verdict.metrics["reward_errors"]) == (0.0, 1.0)


@asynccontextmanager
async def judges() -> AsyncIterator[str]:
    """A judge's endpoint that says yes to what has "8" in it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["messages"][0]["content"]
        said = "yes" if "Response:\n```\n8" in asked else "no"
        return web.json_response(completion_of(turn(said), 0).model_dump())

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_judges_endpoint_is_asked_and_one_that_is_away_is_no_reward_of_0() -> None:
    async with judges() as url:
        task = load("judge", url=url)
        prompt = task.prompt(index_of(task, 4))
        assert (await judged(task, prompt, "8")).reward == 1.0
        assert (await judged(task, prompt, "9")).reward == 0.0
    away = load("judge", url="http://127.0.0.1:9")
    with pytest.raises(TemporaryError, match="got no answer from its endpoint"):
        await judged(away, prompt, "8")


@pytest.mark.parametrize(
    ("said", "error", "complaint"),
    [
        ("away", TemporaryError, "SandboxError: the sandbox is unreachable"),
        ("rewrite", PermanentError, "changed what had been said before"),
        ("show", PermanentError, "a message with 'image_url' in it; only text"),
        ("not a number", ValueError, "invalid literal"),
    ],
)
async def test_what_goes_wrong_in_an_environment_ends_the_rollout_cleaned_up(
    said: str, error: type[Exception], complaint: str
) -> None:
    task = load("guess")
    our_env = importlib.import_module("our_env")
    before = our_env.Guess.cleaned
    with pytest.raises(error, match=complaint):
        await play(task, 4, [said, "4"])
    assert our_env.Guess.cleaned == before + 1


async def test_a_rollout_that_is_cancelled_is_cleaned_up() -> None:
    task = load("guess")
    our_env = importlib.import_module("our_env")
    before = our_env.Guess.cleaned
    script = ScriptedRollout(task, [], index=0)
    asked = asyncio.Event()

    async def wait(messages: Any) -> Turn:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError(messages)

    script.chat = wait  # type: ignore[method-assign]
    rollout = asyncio.create_task(task.rollout(script))
    await asked.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert our_env.Guess.cleaned == before + 1


def test_the_signals_stay_this_processs() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    load("single")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_other_data_set_may_be_asked_for() -> None:
    assert load("only_eval", split="eval").prompt(0) == load("only_eval", split="eval").prompt(0)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (
            {"name": "no-such-env"},
            "name='no-such-env': there is no module 'no_such_env'; install the environment's "
            "package",
        ),
        (
            {"name": "our-needy-env"},
            "our_needy_env imports 'no_such_package_anywhere', which is not installed",
        ),
        ({"name": "our-env"}, "TypeError: .*missing 1 required positional argument: 'kind'"),
        (
            args_of("guess", turns=1),
            r"with spec\.task\.args\.arguments=.*TypeError: .*unexpected keyword argument 'turns'",
        ),
        (
            args_of("away"),
            "needs the network or a file that cannot be reached: ConnectionError",
        ),
        (
            args_of("keyless"),
            "it has a model as judge, but no endpoint for it: set OPENAI_API_KEY",
        ),
        (
            args_of("grouped"),
            "SingleTurnEnv: the reward function 'compared' compares the rollouts of a group",
        ),
        (args_of("own_rollout"), "OwnRollout has a rollout of its own"),
        (args_of("own_response"), "OwnResponse asks for the policy's answers in its own way"),
        (args_of("text"), "message_type='completion'; only 'chat' is supported"),
        (args_of("only_eval"), r"has no data set for spec\.task\.args\.split='train'"),
        ({**args_of("single"), "split": "test"}, "split: Input should be 'train' or 'eval'"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_remedy(
    args: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load_task(TaskName(PATH, args, 0))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(
        SettingsError, match=r"needs the package 'verifiers': pip install 'pipelinerl\[verifiers\]'"
    ):
        load_task(TaskName(PATH, args_of("single"), 0))


def test_messages_are_told_as_the_policy_writes_them() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "x", "type": "function", "function": function}
    given = [
        {"role": "assistant", "content": None, "tool_calls": [call, json.dumps(call)]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
            "tool_call_id": "x",
        },
    ]
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert plain(given) == [
        {"role": "assistant", "content": f"{text}\n{text}"},
        {"role": "tool", "content": "42"},
    ]
    with pytest.raises(PermanentError, match="which is not a message"):
        plain(["hello"])


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected", "calls"),
    [
        ("8", FinishReason.STOP, "stop", 0),
        ("8", FinishReason.LENGTH, "length", 0),
        ('so <tool_call>{"name": "add"}</tool_call>', FinishReason.STOP, "tool_calls", 1),
        ('<tool_call>{"name": 7}</tool_call>', FinishReason.STOP, "stop", 0),
        ("<tool_call>[]</tool_call>", FinishReason.STOP, "stop", 0),
    ],
)
def test_a_turn_becomes_a_completion(
    text: str, finish_reason: FinishReason, expected: str, calls: int
) -> None:
    choice = completion_of(turn(text, finish_reason), 1).choices[0]
    assert choice.finish_reason == expected
    assert len(choice.message.tool_calls or ()) == calls
    assert choice.message.content == ("so " if calls else text)


def test_prompts_without_tools_stay_as_they_are() -> None:
    task = load("guess")
    assert task.prompt(0).messages == Prompt.of(task.prompt(0).facts["row"]["question"]).messages
