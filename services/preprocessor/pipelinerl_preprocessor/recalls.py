"""Prompts of groups that the policy gave up and wants generated again, until their actors have
brought what was sampled.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from pipelinerl_preprocessor.groups import Group


@dataclass(slots=True)
class Recalls:
    """An actor hears of a recalled lease within seconds; one that does not answer before the lease
    would have ended loses it.

    In memory only: after a crash the prompts are open like others.
    """

    _awaited: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Prompt and deadline by lease."""
    _partials: dict[int, bytes] = field(default_factory=dict)
    """What came, by prompt, until it is granted."""

    def recall(self, group: Group) -> None:
        self._awaited[group.lease_id] = (group.prompt_index, group.expires_at)

    def is_recalled(self, lease_id: str) -> bool:
        return lease_id in self._awaited

    @property
    def held(self) -> Container[int]:
        """Prompts that are not to be granted yet."""
        return {prompt for prompt, _ in self._awaited.values()}

    def brought(self, lease_id: str, partial: bytes) -> bool:
        """The actor has stopped it. False when nobody waits for that lease, any more or at all."""
        prompt, _ = self._awaited.pop(lease_id, (-1, 0.0))
        if prompt >= 0 and partial:
            self._partials[prompt] = partial
        return prompt >= 0

    def expire(self, now: float) -> None:
        self._awaited = {
            lease: (prompt, at) for lease, (prompt, at) in self._awaited.items() if at > now
        }

    def take(self, prompt: int) -> bytes:
        """For a new group of this prompt."""
        return self._partials.pop(prompt, b"")

    def clear(self) -> None:
        self._awaited.clear()
        self._partials.clear()
