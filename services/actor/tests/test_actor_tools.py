"""Tasks with tools: what the policy reads, what it calls, what is judged."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from actor_fakes import ScriptedRollout

from pipelinerl_actor.dataset import DataSettings
from pipelinerl_actor.task import Prompt, Turn, Verdict
from pipelinerl_actor.tasks.maths_with_python import MathsWithPython
from pipelinerl_actor.tools import Tool, ToolCall, ToolTask, calls_of, with_tools
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.types import FinishReason


async def add(a: float, b: float) -> str:
    return str(a + b)


async def hang() -> str:
    await asyncio.Event().wait()
    return ""


async def be_away() -> str:
    raise TemporaryError("the service is unreachable")


class Adding(ToolTask):
    tools = (
        Tool("add", 'Adds: {"a": 1, "b": 2}.', add),
        Tool("hang", "Never answers.", hang),
        Tool("be_away", "Is unreachable.", be_away),
    )
    max_turns = 3
    tool_timeout_s = 0.05

    def prompt(self, index: int) -> Prompt:
        return Prompt.of("1 + 2?", index=index)

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        return Verdict(float(answer.text == "3"), {"success": float(answer.text == "3")})


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("3", []),
        (
            f"Then {call('add', a=1)}\n{call('hang')}.",
            [ToolCall("add", {"a": 1}), ToolCall("hang", {})],
        ),
        ('<tool_call>\n{"name": "add"}\n</tool_call>', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [ToolCall("add", [1])]),
        (
            f'<tool_call>{{"name": 7}}</tool_call><tool_call>[1]</tool_call>{call("add")}',
            [None, None, ToolCall("add", {})],
        ),
        ('<tool_call>{"name": "add"', []),
    ],
)
def test_calls_are_read_in_order_and_one_of_another_form_is_none(
    text: str, calls: list[ToolCall | None]
) -> None:
    assert calls_of(text) == calls


async def test_a_call_is_answered_and_the_turn_without_one_is_judged() -> None:
    script = ScriptedRollout(Adding(), [f"Let me see. {call('add', a=1, b=2)}", "3"])
    verdict = await Adding().rollout(script)
    assert verdict == Verdict(
        1.0, {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0, "success": 1.0}
    )
    assert [message["role"] for message in script.received] == ["system", "user", "tool"]
    assert 'add: Adds: {"a": 1, "b": 2}.' in script.received[0]["content"]
    assert script.received[2]["content"] == "3"


async def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    script = ScriptedRollout(Adding(), [call("add", a=1, b=2) + call("add", a=5, b=5), "3"])
    await Adding().rollout(script)
    assert [message["content"] for message in script.received if message["role"] == "tool"] == [
        "3",
        "10",
    ]


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("<tool_call>{</tool_call>", 'error: a call is {"name": ..., "arguments": {...}}'),
        ("<tool_call>[1]</tool_call>", 'error: a call is {"name": ..., "arguments": {...}}'),
        (
            call("multiply"),
            "error: there is no tool 'multiply' with such arguments; there is add, hang, be_away",
        ),
        (call("add", a=1), "error: TypeError: add() missing 1 required positional argument: 'b'"),
        (call("hang"), "error: hang took longer than 0.05 s"),
    ],
)
async def test_the_policy_is_told_what_was_wrong_with_its_call(said: str, result: str) -> None:
    script = ScriptedRollout(Adding(), [said, "3"])
    verdict = await Adding().rollout(script)
    assert script.received[-1]["content"] == result
    assert verdict.metrics["tool_failures"] == 1


async def test_a_tool_that_is_away_leaves_the_trajectory_to_its_retry() -> None:
    with pytest.raises(TemporaryError, match="the service is unreachable"):
        await Adding().rollout(ScriptedRollout(Adding(), [call("be_away")]))


async def test_turns_are_bounded_and_the_last_one_is_judged() -> None:
    script = ScriptedRollout(Adding(), [call("add", a=1, b=2)] * 10)
    verdict = await Adding().rollout(script)
    assert (verdict.reward, verdict.metrics["turns"], verdict.metrics["tool_calls"]) == (
        0.0,
        3.0,
        2.0,
    )


async def test_a_turn_that_was_cut_off_is_judged_as_it_is() -> None:
    script = ScriptedRollout(Adding(), [call("add", a=1, b=2), "3"], FinishReason.LENGTH)
    assert (await Adding().rollout(script)).metrics["turns"] == 1


def test_tools_join_the_prompts_own_system_message() -> None:
    messages = with_tools(
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}), Adding.tools
    )
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou may call")


@pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt install bubblewrap"
)
async def test_maths_with_python_runs_programs_in_the_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"problem": "What is 2^100 mod 97?", "answer": pow(2, 100, 97)}))
    task = MathsWithPython(seed=0, data=DataSettings(path=str(file)))
    says = [
        call("python", program="print(pow(2, 100, 97))"),
        call("python", program="1 / 0"),
        "\\boxed{16}",
    ]
    script = ScriptedRollout(task, says)
    verdict = await task.rollout(script)
    tool_messages = [message["content"] for message in script.received if message["role"] == "tool"]
    assert tool_messages[0] == "16\n"
    assert "ZeroDivisionError" in tool_messages[1]
    assert (verdict.reward, verdict.metrics["tool_calls"], verdict.metrics["turns"]) == (
        1.0,
        2.0,
        3.0,
    )
