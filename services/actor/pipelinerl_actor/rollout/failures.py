"""What can fail while a group is rolled out, and the consequence of each kind of failure.

TemporaryError   retried, `task.maxRetries` times
PermanentError   the trajectory is given up and counted by a short reason
SettingsError, FatalError   the actor ends

A task's own exception is a PermanentError unless it is a TemporaryError. An unreachable generator
(Unavailable) is not a failure: its requests wait for another one.
"""

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import FatalError, PermanentError, SettingsError, TemporaryError
from pipelinerl_common.text import counted

FATAL = (SettingsError, FatalError)


class GivenUp(PermanentError):
    """A trajectory ends without a sample. `reason` is a short word for counters, for example
    "verifier_timeout".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RolloutStopped(GivenUp):
    """A trajectory was stopped on purpose; the group's PartialGroup holds what it sampled."""

    def __init__(self) -> None:
        super().__init__("stopped", "stopped on purpose")


class GroupFailed(PermanentError):
    """Too few of a group's trajectories succeeded; `reason` is why most of the others did not."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Retries:
    """The tries of one piece of work that may fail with a TemporaryError."""

    def __init__(self, reason: str, max_retries: int) -> None:
        """`reason` is that of the GivenUp which ends the tries."""
        self._reason = reason
        self._max_retries = max_retries
        self._backoff = Backoff()

    async def wait(self, error: TemporaryError) -> None:
        """Waits before the next try. Raises GivenUp from `error` when no retry is left."""
        if self._backoff.num_failures >= self._max_retries:
            tries = counted(self._max_retries + 1, "try", "tries")
            raise GivenUp(self._reason, f"{tries}, the last: {error}") from error
        await self._backoff.sleep()


MOST_PROMPTS = 64
"""Prompts that may fail for one permanent reason before anything has succeeded."""

PERMANENT = {
    "task_error": "fix the task; its traceback is in the actor's log",
    "verifier_error": "fix the task's verify; its error is above",
    "bad_verdict": "return a Verdict from the task",
    "non_finite_reward": "return finite rewards from the task",
    "non_finite_metric": "return finite metrics in the task's verdicts",
    "no_turns": "sample something in the task's rollout before it returns a verdict",
    "no_tokens": "check what the model samples: every answer is empty",
    "bad_response": "the generator must keep the contract of its HTTP interface",
    "unpublishable": "shorten the trajectories, or raise the payload limit of the stream's server",
}
"""Remedy for each reason that no retry fixes. So are those of the generator, such as "http_400"."""
GENERATOR_REFUSES = (
    "model.maxModelLen must hold a prompt and task.sampling.maxTokens more, and "
    "the chat template take the messages"
)


class FirstSuccessGuard:
    """Ends an actor whose groups all fail for the same permanent reason, so that a broken task does
    not use up prompts indefinitely. After the first published group it does nothing.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._reason = ""
        self._prompts: set[int] = set()
        self._served_version = -1

    def succeeded(self) -> None:
        """A group is published: from here on failures are only counted, and groups dropped."""
        self._is_over = True
        self._prompts.clear()

    def serves(self, version: int) -> None:
        """Generators serve `version`. A newer one was trained on groups that other actors have
        published, so the count starts over.
        """
        if version > self._served_version:
            self._served_version = version
            self._prompts.clear()

    def failed(self, prompt_index: int, reason: str, message: str) -> None:
        """Raises SettingsError at the 64th prompt in a row that fails for one permanent reason."""
        if self._is_over:
            return
        if reason != self._reason:
            self._reason = reason
            self._prompts.clear()
        remedy = GENERATOR_REFUSES if reason.startswith("http_") else PERMANENT.get(reason)
        if remedy is None:
            return
        self._prompts.add(prompt_index)
        if len(self._prompts) >= MOST_PROMPTS:
            # Groups that fail at the same moment would raise the same error once more each.
            self._is_over = True
            raise SettingsError(
                f"nothing has succeeded, and {MOST_PROMPTS} prompts failed for the same reason: "
                f"{reason}: {message}; {remedy}"
            )
