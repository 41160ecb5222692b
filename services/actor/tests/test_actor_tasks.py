"""The tasks that come along: their prompts are deterministic and endless, their verdicts right."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_actor.dataset import DataSettings
from pipelinerl_actor.task import Prompt, Task, Turn, Verdict
from pipelinerl_actor.tasks.arithmetic import Arithmetic
from pipelinerl_actor.tasks.maths import Maths
from pipelinerl_actor.tasks.reasoning_gym import ReasoningGym
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.types import FinishReason


def turn(text: str) -> Turn:
    return Turn(text, (), (), (), FinishReason.STOP)


def verify(task: Task, prompt: Prompt, text: str) -> Verdict:
    verdict = task.verify(prompt, turn(text))
    assert isinstance(verdict, Verdict)
    return verdict


def content(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


async def test_arithmetic_wants_the_exact_sum() -> None:
    task = Arithmetic(seed=1)
    prompt = task.prompt(5)
    left, right = content(prompt).removesuffix("=").split("+")
    total = int(left) + int(right)
    assert await task.verify(prompt, turn(str(total))) == Verdict(1.0, {"success": 1.0})
    for wrong in (str(total + 1), f" {total}", f"{total} ", f"0{total}", ""):
        assert (await task.verify(prompt, turn(wrong))).reward == 0.0


def test_arithmetic_prompts_depend_on_index_and_seed_and_cover_all_pairs() -> None:
    task = Arithmetic(seed=1)
    assert task.prompt(3) == Arithmetic(seed=1).prompt(3)
    assert [content(task.prompt(i)) for i in range(20)] != [
        content(Arithmetic(seed=2).prompt(i)) for i in range(20)
    ]
    assert len({content(task.prompt(i)) for i in range(2000)}) == 100


def test_arithmetic_refuses_digits_out_of_range() -> None:
    with pytest.raises(SettingsError, match="digits=0 must be 1 to 9"):
        Arithmetic(seed=0, digits=0)


def test_reasoning_gym_scores_the_tagged_answer_with_the_data_sets_own_rule() -> None:
    task = ReasoningGym(seed=3, dataset="leg_counting", config={"max_animals": 4})
    prompt = task.prompt(11)
    answer = prompt.facts["problem"]["answer"]
    assert prompt.messages[0]["role"] == "system"
    assert verify(task, prompt, f"so <answer> {answer} </answer>") == Verdict(
        1.0, {"success": 1.0, "tagged": 1.0}
    )
    assert verify(task, prompt, answer).metrics == {"success": 1.0, "tagged": 0.0}
    assert verify(task, prompt, "<answer>-1</answer>").reward < 1.0
    assert task.prompt(11) == ReasoningGym(
        seed=3, dataset="leg_counting", config={"max_animals": 4}
    ).prompt(11)


def test_reasoning_gym_starts_over_at_the_end_and_seeds_do_not_overlap() -> None:
    task = ReasoningGym(seed=0, dataset="leg_counting", size=10, system="")
    assert task.prompt(13) == task.prompt(3)
    assert len(task.prompt(0).messages) == 1
    other = ReasoningGym(seed=1, dataset="leg_counting", size=10, system="")
    assert not {content(task.prompt(i)) for i in range(10)} & {
        content(other.prompt(i)) for i in range(10)
    }


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"dataset": "leg_countin"}, "did you mean leg_counting"),
        ({"dataset": "?"}, "it has .*leg_counting"),
        (
            {"dataset": "leg_counting", "config": {"no_such": 1}},
            "does not fit the data set 'leg_counting': .*no_such",
        ),
        (
            {"dataset": "leg_counting", "config": {"min_animals": -1}},
            "does not fit the data set 'leg_counting'",
        ),
        ({"dataset": "leg_counting", "size": 0}, "size=0 must be at least 1"),
    ],
)
def test_reasoning_gym_names_mistakes(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ReasoningGym(seed=0, **args)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    records = [{"problem": f"What is {n}/2?", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(1, 8)]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return file


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("We get \\boxed{\\frac{5}{2}}", 1.0),
        ("\\boxed{2.5}", 1.0),
        ("The answer is $\\frac{10}{4}$.", 1.0),
        ("\\boxed{2}", 0.0),
        ("I do not know", 0.0),
        ("", 0.0),
    ],
)
def test_maths_compares_by_value(problems: Path, answer: str, reward: float) -> None:
    task = Maths(seed=0, data=DataSettings(path=str(problems)))
    assert verify(task, Prompt.of("", answer="\\frac{5}{2}"), answer).reward == reward


def test_maths_shuffles_every_epoch_anew_and_repeats_with_the_seed(problems: Path) -> None:
    task = Maths(seed=0, data=DataSettings(path=str(problems)))
    epochs = [[content(task.prompt(7 * epoch + i)) for i in range(7)] for epoch in range(3)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = Maths(seed=0, data=DataSettings(path=str(problems)))
    assert [content(again.prompt(i)) for i in range(21)] == [*epochs[0], *epochs[1], *epochs[2]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"bad\.jsonl:2: not JSON"),
        ("[1]", r"bad\.jsonl:2: a list, not an object"),
        ('{"problem": "p"}', r"bad\.jsonl:2: no field 'answer'; it has 'problem'"),
        ('{"problem": "", "answer": "1"}', r"bad\.jsonl:2: 'problem' is '', not a text"),
        (
            '{"problem": "p", "answer": null}',
            r"bad\.jsonl:2: 'answer' is None, not a text or a number",
        ),
    ],
)
def test_maths_names_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"problem": "p", "answer": 1}\n' + line)
    with pytest.raises(SettingsError, match=complaint):
        Maths(seed=0, data=DataSettings(path=str(file)))


def test_maths_names_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no file or folder .*none\.jsonl"):
        Maths(seed=0, data=DataSettings(path=str(tmp_path / "none.jsonl")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SettingsError, match="holds no problem"):
        Maths(seed=0, data=DataSettings(path=str(tmp_path / "empty.jsonl")))
