"""Mathematics with a Python tool: the policy may run programs in the sandbox before it answers."""

import asyncio

from pipelinerl_actor.dataset import DataSettings
from pipelinerl_actor.sandbox import DEFAULT_LIMITS, Sandbox, SandboxEnding, SandboxLimits
from pipelinerl_actor.tasks.maths import DEFAULT_SYSTEM, Maths
from pipelinerl_actor.tools import Tool, ToolTask

_RUNS_AT_ONCE = 4
"""Programs that one actor runs at the same time; further calls wait."""


class MathsWithPython(ToolTask, Maths):
    """Maths with a Python tool, in at most `max_turns` turns, the last of which is judged. Other
    parameters are those of Maths.
    """

    def __init__(
        self,
        *,
        seed: int,
        data: DataSettings,
        problem_field: str = "problem",
        answer_field: str = "answer",
        system: str = DEFAULT_SYSTEM,
        max_turns: int = 4,
        limits: SandboxLimits = DEFAULT_LIMITS,
    ) -> None:
        Maths.__init__(
            self,
            seed=seed,
            data=data,
            problem_field=problem_field,
            answer_field=answer_field,
            system=system,
        )
        self._sandbox = Sandbox(limits)
        self._room = asyncio.Semaphore(_RUNS_AT_ONCE)
        self.max_turns = max_turns
        self.tool_timeout_s = 60.0 + limits.seconds
        self.tools = (
            Tool(
                "python",
                'Runs a program and returns what it prints: {"program": "print(2**10)"}.',
                self._python,
            ),
        )

    async def _python(self, program: str) -> str:
        async with self._room:
            result = await asyncio.to_thread(self._sandbox.run, program, "")
        if result.ending is SandboxEnding.OUT_OF_TIME:
            return f"{result.stdout}\nerror: out of time"
        return result.stdout if result.succeeded else f"{result.stdout}\n{result.stderr}"
