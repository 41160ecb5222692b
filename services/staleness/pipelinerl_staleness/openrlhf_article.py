"""OpenRLHF as the comparison article models it: permits of groups, which is AReaL's capacity with
one batch less.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings, Take


@dataclass(frozen=True, slots=True)
class OpenrlhfArticleSettings(PolicySettings):
    async_queue_size: int = 1
    """Batches outstanding (OpenRLHF `async_queue_size`), at least 1; 1 is synchronous here, unlike
    in OpenRLHF's code.
    """

    def __post_init__(self) -> None:
        check_whole("async_queue_size", self.async_queue_size, 1)


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
