"""The interface that users write tasks against. It imports nothing heavy; a task may import what it
likes.

A task is an endless sequence of prompts and a way to tell how good a trajectory is. The simplest is
a class with two methods:

    from pipelinerl_actor.task import Prompt, Task, Turn, Verdict

    class Shout(Task):
        def __init__(self, *, seed: int, words: int = 3) -> None:      # `words` can be set in the job file's task.args
            self.seed, self.words = seed, words

        def prompt(self, index: int) -> Prompt:                        # the same index gives the same prompt, always
            return Prompt.of(f"Say {self.words} words in capitals. ({index})")

        async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
            return Verdict(reward=float(answer.text.isupper()))

    spec: {task: {path: "my_package.my_module:Shout", args: {words: 5}}}

The module is found in the folder that `pipelinerl up` is started in, on PYTHONPATH, or among the
installed packages.

`verify` may be `async def`: it runs in the rollout loop, for quick checks and for calls of remote services. Or plain `def`: it
runs in a separate process, for checks that compute, use signals, or may hang; the process is ended
when the time limit (`task.verifierTimeoutSeconds`) is over. Such a process makes the task anew from
its path, args and seed, and asks it for the prompt.

A multi-turn task overrides `rollout`, which drives one trajectory and returns its verdict. Tokens
are kept exactly as they were sampled; text is never turned into tokens a second time:

        async def rollout(self, rollout: Rollout) -> Verdict:
            turn = await rollout.chat(rollout.prompt.messages)
            turn = await rollout.chat([{"role": "user", "content": "Louder!"}])
            return await rollout.verify(turn)

Instead of a class, `task.path` may name a function that takes `seed` and task.args as keywords and
returns a Task; or an
`async def` function that takes a Rollout, and task.args as keywords, and returns a Verdict: it makes its own prompt from
`rollout.prompt_index` and `rollout.seed`.

What a task raises counts against that trajectory only: TemporaryError is tried again
(`task.maxRetries` times), everything else gives the trajectory up. It ends the job only where
nothing has succeeded yet and 64 prompts have failed for the same reason. Metrics of a Verdict reach
the dashboards averaged; one called "success" (0 or 1) is shown as the success rate.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from pipelinerl_common.types import FinishReason, VersionRun


class Message(TypedDict):
    """One chat message, for example {"role": "user", "content": "3+4="}."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a trajectory starts from, and what its verifier must know."""

    messages: tuple[Message, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the task's own making, for example {"answer": "7"}; the policy never sees it."""

    @classmethod
    def of(cls, text: str, **facts: Any) -> "Prompt":
        """A single user message: Prompt.of("3+4=", answer="7")."""
        return cls(({"role": "user", "content": text},), facts)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled in answer to one request.

    Example: Turn("7", (25, 2), (-0.1, -0.02), (VersionRun(3, 2),), FinishReason.STOP).
    """

    text: str
    """Without the end token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the distribution that each token was really sampled from."""
    version_runs: tuple[VersionRun, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """How good a trajectory is. A reward that is not a finite number gives the trajectory up."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Rollout(Protocol):
    """One trajectory in the making, as its task sees it."""

    @property
    def prompt_index(self) -> int: ...

    @property
    def sample_index(self) -> int:
        """Position of this trajectory in its group, from 0."""
        ...

    @property
    def seed(self) -> int:
        """`spec.seed`."""
        ...

    @property
    def prompt(self) -> Prompt:
        """The task's prompt of `prompt_index`; an empty one for a task that is a function."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns so far."""
        ...

    async def chat(self, messages: Sequence[Message]) -> Turn:
        """Adds `messages` to the trajectory and samples the policy's answer.

        Raises PermanentError when the context is full or the request is refused.
        """
        ...

    async def complete(self, token_ids: Sequence[int]) -> Turn:
        """Adds `token_ids` as they are and samples what follows."""
        ...

    async def verify(self, turn: Turn) -> Verdict:
        """The task's `verify` under its time limit, for a task that has one."""
        ...


class Task(ABC):
    """A source of prompts with a verifier. Constructors take keywords only: `seed` and what is in
    `task.args`.
    """

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt at `index` of the endless sequence. Deterministic and quick: it is called
        again for every retry.

        With `index` from 0 on; a data set of N problems starts over at N, best in another order.
        """

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict | Awaitable[Verdict]:
        """The verdict on a trajectory whose last turn is `answer`. See the module's description for
        `def` or `async def`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no verify(prompt, answer), so its rollout must return a "
            "Verdict"
        )

    async def rollout(self, rollout: Rollout) -> Verdict:
        """One whole trajectory. Single-turn unless overridden."""
        return await rollout.verify(await rollout.chat(rollout.prompt.messages))


@dataclass(frozen=True, slots=True)
class TaskName:
    """What makes a task, here and in a verifier's process: path, args and seed."""

    path: str
    args: Mapping[str, Any]
    seed: int
