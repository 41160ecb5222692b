"""prime-rl's rule: an adaptive cap on what is in flight, cancelling at the publish, and a sweep
before each batch.
"""

from dataclasses import dataclass

from pipelinerl_staleness.adaptive_cap import AdaptiveCap
from pipelinerl_staleness.checks import check_optional_whole, check_whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import EngineLoad, PolicySettings, Take
from pipelinerl_staleness.trajectory_slots import TrajectorySlots

_TARGET_LAG = 1


@dataclass(frozen=True, slots=True)
class PrimeRlSettings(PolicySettings):
    eta: int = 8
    """Oldest age of a trained group in versions (prime-rl `max_off_policy_steps`), at least 0."""
    max_inflight: int = 1024
    """Upper end of the adaptive cap, trajectories (prime-rl `concurrency.max_inflight`)."""
    min_inflight: int = 1
    """Lower end of the adaptive cap, trajectories (prime-rl `concurrency.min_inflight`)."""
    initial_inflight: int | None = None
    """The cap at the start, trajectories (prime-rl `concurrency.initial_inflight`); unset is one
    batch. prime-rl itself starts with the KV tokens of all generators divided by the longest
    sequence.
    """
    group_size: int = 8
    """Trajectories per group."""
    max_ready: int | None = None
    """Finished groups that wait at most before admission stops; unset is eta + 2 batches, more than
    can ever be trained.
    """

    def __post_init__(self) -> None:
        check_whole("eta", self.eta, 0)
        check_whole("min_inflight", self.min_inflight, 1)
        check_whole("max_inflight", self.max_inflight, self.min_inflight)
        check_optional_whole("initial_inflight", self.initial_inflight, 1)
        check_whole("group_size", self.group_size, 1)
        check_optional_whole("max_ready", self.max_ready, 1)


class PrimeRl(GroupPolicy):
    """Admits while the batch being collected is at most one version ahead of the engines and
    trajectories in flight are under the cap; a publish cancels running groups stamped before k -
    eta; the sweep drops finished ones of that age, and the batch is the B earliest finished.
    Strict: at most eta. With eta = 0 the lag gate is 0 as well, since a group admitted one version
    behind could never be trained.
    """

    settings_type = PrimeRlSettings
    settings: PrimeRlSettings
    keeps_kv = True

    def __init__(self, settings: PrimeRlSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        self._max_ready = (
            (settings.eta + 2) * groups_per_step
            if settings.max_ready is None
            else settings.max_ready
        )
        if self._max_ready < groups_per_step:
            raise ValueError(
                f"max_ready={self._max_ready} must be at least the {groups_per_step} groups of a "
                "step"
            )
        self._reset()

    def may_admit(self) -> bool:
        lag = self._collecting() - self.version
        has_room = len(self.groups.ready) < self._max_ready and self._cap.admits(
            self._slots.num_held
        )
        return has_room and lag <= min(_TARGET_LAG, self.settings.eta)

    def admitted(self, group: str) -> None:
        super().admitted(group)
        self._slots.hold(group)
        self._cap.opened(self.settings.group_size)

    def trajectory_finished(self, group: str) -> None:
        in_flight = self._slots.num_held
        if self._slots.free_one(group):
            self._cap.completed(in_flight)

    def finished(self, group: str) -> None:
        super().finished(group)
        self._slots.free(group)

    def lost(self, group: str) -> None:
        super().lost(group)
        self._slots.free(group)

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        self._cap.new_window()
        return self._cancel_running(
            self.groups.running_before(self._collecting() - self.settings.eta)
        )

    def observe(self, load: EngineLoad) -> tuple[str, ...]:
        youngest: list[str] = []
        if self._cap.observe(load, self._slots.num_held):
            excess = self._slots.num_held - int(self._cap.value)
            candidates = list(self.groups.running)[
                :0:-1
            ]  # the oldest running group is never cancelled
            youngest = candidates[: max(0, excess // self.settings.group_size)]
        return self._cancel_running(tuple(youngest))

    def take(self, step: int) -> Take:
        dropped = self.cancel(self.groups.ready_before(step - self.settings.eta))
        if step - self.version > _TARGET_LAG:
            return self.wait(
                f"version {self.version} is served, batch {step} needs {step - _TARGET_LAG}",
                dropped,
            )
        return self.deliver(self.groups.ready, dropped)

    def trajectory_limit(self) -> int:
        return int(self._cap.value)

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._reset()

    def bound(self) -> int:
        return self.settings.eta

    def max_outstanding(self) -> int:
        return self._max_ready - 1 + self.settings.max_inflight

    def _reset(self) -> None:
        settings = self.settings
        batch = self.groups_per_step * settings.group_size
        initial = batch if settings.initial_inflight is None else settings.initial_inflight
        self._cap = AdaptiveCap(
            initial, settings.min_inflight, settings.max_inflight, settings.group_size
        )
        self._slots = TrajectorySlots(settings.group_size)

    def _collecting(self) -> int:
        return max(self.num_taken // self.groups_per_step, self.version)

    def _cancel_running(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        for group in groups:
            self._slots.free(group)
        return self.cancel(groups)
