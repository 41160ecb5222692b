"""Verifiers under their time limits, in the loop and in processes."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipelinerl_actor.rollout.failures import GivenUp
from pipelinerl_actor.rollout.verifier import Verifier
from pipelinerl_actor.task import Prompt, TaskName, Turn, Verdict
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import FatalError
from pipelinerl_common.types import FinishReason, VersionRun

TASKS = """
import os, pathlib, signal, sys, time
from pipelinerl_actor.task import Prompt, Task, Verdict
from pipelinerl_common.errors import TemporaryError

class Plain(Task):
    def __init__(self, *, seed: int, bonus: float = 0.0):
        self.seed, self.bonus = seed, bonus
    def prompt(self, index):
        return Prompt.of(f"prompt {index}", index=index)
    def verify(self, prompt, answer):
        print("printing must not break the protocol")
        text = answer.text
        if text == "hang": time.sleep(3600)
        if text == "die": os.kill(os.getpid(), signal.SIGKILL)
        if text == "raise": raise ValueError("cannot judge")
        if text == "wrong type": return 1.0
        if text.startswith("temporary"):
            marker = pathlib.Path(text.split(" ")[1])
            if len(marker.read_text()) < 2:
                marker.write_text(marker.read_text() + "x")
                raise TemporaryError("the service is unreachable")
        facts = {"pid": os.getpid(), "seed": self.seed, "index": prompt.facts["index"]}
        version = answer.version_runs[0].policy_version
        facts |= {"tokens": len(answer.token_ids), "version": version}
        return Verdict(1.0 + self.bonus, facts)

def decorated(function):
    def wrapper(self, prompt, answer):
        return function(self, prompt, answer)
    return wrapper

class Decorated(Plain):
    @decorated
    async def verify(self, prompt, answer):
        return Verdict(3.0)

class OnlyHere(Plain):
    def __init__(self, *, seed: int):
        if "pipelinerl_actor.rollout.verifier" not in sys.modules:
            raise RuntimeError("not in a verifier's process")
        super().__init__(seed=seed)

class Away(Plain):
    async def verify(self, prompt, answer):
        raise TemporaryError("the service is unreachable")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifier_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))


@asynccontextmanager
async def verifying(
    task: str = "Plain", timeout_s: float = 30.0, num_processes: int = 1, **args: object
) -> AsyncIterator[Verifier]:
    name = TaskName(f"verifier_tasks:{task}", args, seed=5)
    verifier = Verifier(
        load_task(name), name, timeout_s=timeout_s, max_retries=2, num_processes=num_processes
    )
    try:
        yield verifier
    finally:
        await verifier.close()


async def ask(verifier: Verifier, text: str, index: int = 3) -> Verdict:
    answer = Turn(text, (1, 2), (-0.5, -0.25), (VersionRun(9, 2),), FinishReason.STOP)
    return await verifier.verify(index, Prompt.of(f"prompt {index}", index=index), answer)


async def test_a_plain_verify_runs_in_a_process_with_the_same_task_prompt_and_answer() -> None:
    async with verifying(bonus=0.5) as verifier:
        verdict = await ask(verifier, "fine")
    assert verdict.reward == 1.5
    assert verdict.metrics["pid"] != os.getpid()
    assert {name: verdict.metrics[name] for name in ("seed", "index", "tokens", "version")} == {
        "seed": 5.0,
        "index": 3.0,
        "tokens": 2.0,
        "version": 9.0,
    }


async def test_a_plain_verify_that_returns_a_coroutine_is_awaited() -> None:
    async with verifying("Decorated") as verifier:
        assert (await ask(verifier, "fine")).reward == 3.0


async def test_a_process_is_used_again_until_it_hangs_and_then_replaced() -> None:
    async with verifying(timeout_s=3.0) as verifier:
        first = (await ask(verifier, "fine")).metrics["pid"]
        assert (await ask(verifier, "fine")).metrics["pid"] == first
        with pytest.raises(GivenUp, match="longer than 3 s") as raised:
            await ask(verifier, "hang")
        assert raised.value.reason == "verifier_timeout"
        assert not _is_running(int(first))
        assert (await ask(verifier, "fine")).metrics["pid"] != first


async def test_a_process_that_dies_gives_up_its_trajectory_only() -> None:
    async with verifying() as verifier:
        with pytest.raises(GivenUp) as raised:
            await ask(verifier, "die")
        assert raised.value.reason == "verifier_died"
        assert (await ask(verifier, "fine")).reward == 1.0


@pytest.mark.parametrize("text", ["raise", "wrong type"])
async def test_what_verify_raises_gives_the_trajectory_up(text: str) -> None:
    async with verifying() as verifier:
        with pytest.raises(GivenUp) as raised:
            await ask(verifier, text)
        assert raised.value.reason == "verifier_error"


async def test_a_prompt_that_is_another_one_in_the_process_is_not_judged() -> None:
    async with verifying() as verifier:
        with pytest.raises(GivenUp, match=r"prompt\(3\) is not the same in two processes"):
            await verifier.verify(
                3, Prompt.of("something else", index=3), Turn("fine", (), (), (), FinishReason.STOP)
            )


async def test_a_temporary_error_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("")
    async with verifying() as verifier:
        assert (await ask(verifier, f"temporary {marker}")).reward == 1.0
    assert marker.read_text() == "xx"


async def test_a_service_that_stays_away_gives_the_trajectory_up_after_bounded_tries() -> None:
    async with verifying("Away") as verifier:
        with pytest.raises(
            GivenUp, match="3 tries, the last: the service is unreachable"
        ) as raised:
            await ask(verifier, "fine")
    assert raised.value.reason == "verifier_unavailable"


async def test_no_more_processes_run_than_allowed() -> None:
    async with verifying(num_processes=2) as verifier:
        verdicts = await asyncio.gather(*(ask(verifier, "fine", index) for index in range(20)))
    assert [verdict.metrics["index"] for verdict in verdicts] == list(range(20))
    assert len({verdict.metrics["pid"] for verdict in verdicts}) <= 2


async def test_closing_ends_the_processes() -> None:
    async with verifying() as verifier:
        pid = (await ask(verifier, "fine")).metrics["pid"]
    assert not _is_running(int(pid))


async def test_a_task_that_cannot_be_made_in_the_process_is_fatal() -> None:
    async with verifying("OnlyHere") as verifier:
        with pytest.raises(FatalError, match="not in a verifier's process"):
            await ask(verifier, "fine")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
