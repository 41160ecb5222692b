"""The interface that users write tasks against. It imports nothing heavy; a task may import any
package.

A task is an endless sequence of prompts and a measure of how good a trajectory is. The simplest is
a class with two methods:

    from pipelinerl_actor.task import Prompt, Task, Turn, Verdict

    class Shout(Task):
        def __init__(self, *, seed: int, words: int = 3) -> None:  # `words` is from task.args
            self.seed, self.words = seed, words

        def prompt(self, index: int) -> Prompt:  # the same index always gives the same prompt
            return Prompt.of(f"Say {self.words} words in capitals. ({index})")

        async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
            return Verdict(reward=float(answer.text.isupper()))

    spec: {task: {path: "my_package.my_module:Shout", args: {words: 5}}}

The module is found in the folder that `pipelinerl up` is started in, on PYTHONPATH, or among the
installed packages.

`verify` may be `async def`: it runs in the rollout loop, for quick checks and for calls of remote
services. Or plain `def`: it runs in a separate process, for checks that compute, use signals, or
may hang; the process is killed after the time limit (`task.verifierTimeoutSeconds`). Such a process
makes its own task from the path, args and seed, and gets the prompt from it.

A multi-turn task overrides `rollout`, which drives one trajectory and returns its verdict. Tokens
are kept exactly as they were sampled; text is never turned into tokens a second time:

        async def rollout(self, rollout: Rollout) -> Verdict:
            turn = await rollout.chat(rollout.prompt.messages)
            turn = await rollout.chat([{"role": "user", "content": "Louder!"}])
            return await rollout.verify(turn)

Instead of a class, `task.path` may name a function that takes `seed` and task.args as keywords and
returns a Task; or an `async def` function that takes a Rollout, and task.args as keywords, and
returns a Verdict: it makes its own prompt from `rollout.prompt_index` and `rollout.seed`.

An error of a task affects that trajectory only: a TemporaryError is retried (`task.maxRetries`
times), any other gives the trajectory up. It ends the job only if nothing has succeeded yet and 64
prompts have failed for the same reason. The metrics of Verdicts are averaged for the dashboards;
one called "success" (0 or 1) is shown as the success rate.
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
    """The messages that a trajectory starts from, and the facts that its verifier needs."""

    messages: tuple[Message, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Chosen by the task, for example {"answer": "7"}; the policy never sees them."""

    @classmethod
    def of(cls, text: str, **facts: Any) -> "Prompt":
        """A single user message: Prompt.of("3+4=", answer="7")."""
        return cls(({"role": "user", "content": text},), facts)

    @classmethod
    def after_system(cls, system: str, text: str, **facts: Any) -> "Prompt":
        """A user message after a system message, which is left out when it is empty."""
        first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        return cls((*first, {"role": "user", "content": text}), facts)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy, as it was sampled.

    Example: Turn("7", (25, 2), (-0.1, -0.02), (VersionRun(3, 2),), FinishReason.STOP).
    """

    text: str
    """Without the end token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probabilities under the distribution that each token was really sampled from."""
    version_runs: tuple[VersionRun, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a trajectory. A reward that is not finite gives the trajectory up."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Rollout(Protocol):
    """One trajectory under way, as its task sees it."""

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
        """Adds `token_ids` as they are and samples the tokens after them."""
        ...

    async def verify(self, turn: Turn) -> Verdict:
        """The task's `verify` under its time limit, for a task that has one."""
        ...


class Task(ABC):
    """A source of prompts with a verifier. Constructors take keywords only: `seed`, and the
    entries of `task.args`.
    """

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`, from 0 on, of the endless sequence. Deterministic and quick: it is
        called again for every retry. A data set of N problems starts over at N, best in another
        order.
        """

    def verify(self, prompt: Prompt, answer: Turn) -> Verdict | Awaitable[Verdict]:
        """The verdict on a trajectory whose last turn is `answer`; `def` or `async def`, see the
        module's description.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no verify(prompt, answer), so its rollout must return a "
            "Verdict"
        )

    async def rollout(self, rollout: Rollout) -> Verdict:
        """Drives one whole trajectory; a single turn unless overridden."""
        return await rollout.verify(await rollout.chat(rollout.prompt.messages))


@dataclass(frozen=True, slots=True)
class TaskName:
    """What a task is made of, here and in a verifier's process: path, args and seed."""

    path: str
    args: Mapping[str, Any]
    seed: int
