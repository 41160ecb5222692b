"""What verl's two strategies share: the warm-up, the span of a group, and which ready groups make
the batch.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_number, check_whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import PolicySettings


@dataclass(frozen=True, slots=True)
class VerlSettings(PolicySettings):
    eta: int = 8
    """Threshold of the span k - stamp + 1 of a group (verl `max_off_policy_threshold`), at least 1.
    """
    num_warmup_batches: float = 1
    """Batches admitted at the start beyond the first one (verl `num_warmup_batches`), at least 0,
    fractions allowed.
    """

    def __post_init__(self) -> None:
        check_whole("eta", self.eta, 1)
        check_number("num_warmup_batches", self.num_warmup_batches, 0)


class Verl(GroupPolicy):
    """W batches once and B groups with each version, one more for every group that was evicted or
    failed.
    """

    settings: VerlSettings

    def may_admit(self) -> bool:
        return self.within_capacity(self.settings.num_warmup_batches)

    def span(self, stamp: int, step: int) -> int:
        """Versions that a group touches from its admission to the step that would train it, both
        counted.
        """
        return step - stamp + 1

    def max_outstanding(self) -> int:
        return self.groups_per_step + int(self.settings.num_warmup_batches * self.groups_per_step)
