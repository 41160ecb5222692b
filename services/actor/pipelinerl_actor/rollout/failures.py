"""What can go wrong with a trajectory, sorted: tried again, given up, or the actor's end.

TemporaryError   tried again, `task.maxRetries` times
PermanentError   the trajectory is given up and counted by a short reason
SettingsError, FatalError   the actor ends

A task's own exception is a PermanentError unless it is a TemporaryError. A generator that is away
(Unavailable) is no failure: requests wait for one that is not.

A job of which nothing succeeds, always for the same reason, is ended instead of burning prompts
for ever.
"""

import random

from pipelinerl_common.errors import FatalError, PermanentError, SettingsError
from pipelinerl_common.text import counted


class GivenUp(PermanentError):
    """A trajectory ends without a sample. `reason` is a short word for counters, for example
    "verifier_timeout".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def exhausted(reason: str, num_failures: int, max_retries: int, error: Exception) -> GivenUp | None:
    """What to raise from `error` when the tries have run out, of which `num_failures` have failed;
    None before.
    """
    if num_failures <= max_retries:
        return None
    return GivenUp(reason, f"{counted(num_failures, 'try', 'tries')}, the last: {error}")


FATAL = (SettingsError, FatalError)

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after `num_failures` (at least 1) in a row: doubling, with jitter so that
    many do not return at once.
    """
    longest_s = min(_FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 10), _MAX_BACKOFF_S)
    return longest_s * random.uniform(0.5, 1.0)


MOST_PROMPTS = 64

PERMANENT = {
    "task_error": "repair the task, whose traceback is in the actor's log",
    "verifier_error": "repair the task's verify, whose error is above",
    "bad_verdict": "let the task return a Verdict",
    "non_finite_reward": "let the task's rewards be finite",
    "non_finite_metric": "let the metrics of the task's verdicts be finite",
    "no_turns": "let the task's rollout sample something before it returns a verdict",
    "no_tokens": "see what the model samples: every answer is empty",
    "bad_response": "the generator must keep the contract of its HTTP interface",
    "unpublishable": "shorten the trajectories, or raise the payload limit of the stream's server",
}
"""Reasons that no retry can help, and the remedy. Those of the generator, "http_400" and its like,
are such too.
"""
GENERATOR_REFUSES = (
    "model.maxModelLen must hold a prompt and task.sampling.maxTokens more, and "
    "the chat template take the messages"
)


class FirstSuccessGuard:
    """Of one actor's process: what has failed while nothing has succeeded."""

    def __init__(self) -> None:
        self._is_over = False
        self._reason = ""
        self._prompts: set[int] = set()
        self._served_version = -1

    def succeeded(self) -> None:
        """A group is published: whatever fails from here on is counted and dropped."""
        self._is_over = True
        self._prompts.clear()

    def serves(self, version: int) -> None:
        """Generators serve `version`. A new one is made of groups that others have published: then
        counting begins again.
        """
        if version > self._served_version:
            self._served_version = version
            self._prompts.clear()

    def failed(self, prompt_index: int, reason: str, message: str) -> None:
        """Raises SettingsError when so many prompts in a row have failed for one permanent reason."""
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
            self._is_over = True  # those that fail beside it say nothing else
            raise SettingsError(
                f"nothing has succeeded, and {MOST_PROMPTS} prompts failed for the same reason: "
                f"{reason}: {message}; {remedy}"
            )


class TrajectoryStopped(GivenUp):
    """A trajectory was stopped on purpose; its Answers has what it sampled."""

    def __init__(self) -> None:
        super().__init__("stopped", "stopped on purpose")
