"""A job of which nothing succeeds, always for the same reason, is ended instead of burning prompts
for ever.
"""

from pipelinerl_common.errors import SettingsError

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


class Beginning:
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
