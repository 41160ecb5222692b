"""OpenRLHF's asynchronous loop, twice: as its code has it, whole batches, one generated at a time,
limited by a queue of permits; and as the comparison article models it, permits of groups, which is
AReaL's capacity with one batch less.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import flag, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class OpenrlhfSettings(PolicySettings):
    """Parameters of `openrlhf`."""

    async_queue_size: int = whole(1, at_least=1)
    """Batches generated or queued and not yet taken (OpenRLHF `async_queue_size`), at least 1."""
    partial_rollout: bool = flag(False)
    """Whether weights change while a batch is generated (OpenRLHF `partial_rollout`). Without it
    the publish waits for the running batch and no new one starts meanwhile, so that each batch has
    one version.
    """


class Openrlhf(GroupPolicy):
    """Batches are B groups in a row of the dispatch order. Batch j opens when no group runs and at
    most q - 1 batches wait (the permit comes back when a batch is taken), and not before version j
    - q is served; they are trained in order, each when it is complete. Strict: at most q.

    A group that fails leaves a short batch, which is filled up at once by the next group, younger
    than the batch and hence within the bound.
    """

    settings_type = OpenrlhfSettings
    settings: OpenrlhfSettings
    keeps_kv = True

    def __init__(self, settings: OpenrlhfSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._num_trained = 0

    def may_admit(self) -> bool:
        is_short = len(self.groups) % self.groups_per_step > 0
        return is_short or self._may_open()

    def take(self, step: int) -> Take:
        return self.deliver_in_dispatch_order()

    def step_done(self, step: int) -> None:
        self._num_trained = max(self._num_trained, step + 1)

    def may_publish(self) -> bool:
        return self.settings.partial_rollout or not self.groups.running

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._num_trained = step

    def bound(self) -> int:
        return self.settings.async_queue_size

    def max_outstanding(self) -> int:
        return self.settings.async_queue_size * self.groups_per_step

    def min_waiting(self) -> int:
        return self.max_outstanding()

    def _may_open(self) -> bool:
        weights_wait = not self.settings.partial_rollout and self._num_trained > self.version
        has_permit = len(self.groups) < self.max_outstanding() and self.within_capacity(
            self.settings.async_queue_size
        )
        return has_permit and not self.groups.running and not weights_wait


@dataclass(frozen=True, slots=True)
class OpenrlhfArticleSettings(PolicySettings):
    """Parameters of `openrlhf_article`."""

    async_queue_size: int = whole(1, at_least=1)
    """Batches outstanding (OpenRLHF `async_queue_size`), at least 1; 1 is synchronous here, unlike
    in OpenRLHF's code.
    """


class OpenrlhfArticle(GroupPolicy):
    """Decides as `areal` does with eta = async_queue_size - 1: B earliest started of the finished,
    no bound beyond q = 1.
    """

    settings_type = OpenrlhfArticleSettings
    settings: OpenrlhfArticleSettings

    def may_admit(self) -> bool:
        return self.within_capacity(self.settings.async_queue_size - 1)

    def take(self, step: int) -> Take:
        return self.deliver(self.groups.ready_by_dispatch())

    def bound(self) -> int | None:
        return 0 if self.settings.async_queue_size == 1 else None

    def max_outstanding(self) -> int:
        return self.settings.async_queue_size * self.groups_per_step
