"""prime-rl's rule: an adaptive cap on the trajectories in flight, cancelling at the publish, and a
sweep before each batch.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import check_whole, optional_whole, whole
from pipelinerl_staleness.groups import TrajectoryPolicy
from pipelinerl_staleness.policy import EngineLoad, PolicySettings, Take

_GROWTH_PER_TURNOVER = 1.25
_GROWTH_KV_USAGE = 0.6
_GROWTH_GATE_S = 15.0
_SOFT_KV_USAGE = 0.8
_HARD_KV_USAGE = 0.9
_TARGET_KV_USAGE = 0.7
_COOLDOWN_REPORTS = 6
_BURST_WINDOW_S = 5.0


class AdaptiveCap:
    """The most trajectories in flight. The cap grows by a quarter per turnover while the last
    report was quiet and the cap is used; it is cut to what would use 70 % of the KV blocks when
    they run full, to 80 % of the running ones after preemptions and to 90 % when requests keep
    queueing.

    Growth between reports is limited too: opening more than a tenth of the cap within 5 s waits for
    the next window.
    """

    def __init__(self, initial: int, least: int, most: int, group_size: int) -> None:
        self._least = least
        self._most = most
        self._group_size = group_size
        self.value = float(min(max(initial, least), most))
        self._growth_left_s = 0.0
        self._cooldown = 0
        self._num_queueing_reports = 0
        self._burst_left: float | None = None
        self._window_s = 0.0

    def admits(self, num_in_flight: int) -> bool:
        return num_in_flight < int(self.value) and (
            self._burst_left is None or self._burst_left > 0
        )

    def opened(self, num_trajectories: int) -> None:
        if self._burst_left is not None:
            self._burst_left -= num_trajectories

    def completed(self, num_in_flight: int) -> None:
        """One of `num_in_flight` trajectories finished by itself, not cancelled."""
        if self._burst_left is not None:
            self._burst_left += 1
        if self._growth_left_s > 0 and num_in_flight >= 0.9 * int(self.value):
            self._set(self.value * _GROWTH_PER_TURNOVER ** (1 / num_in_flight))

    def new_window(self) -> None:
        if self._burst_left is not None:
            self._burst_left = max(float(self._group_size), self.value // 10)
        self._window_s = 0.0

    def observe(self, load: EngineLoad, num_in_flight: int) -> bool:
        """Adapts to a report. True when trajectories over the new cap are to be cancelled, youngest
        first.
        """
        self._burst_left = 0.0 if self._burst_left is None else self._burst_left
        self._window_s += load.seconds
        if self._window_s >= _BURST_WINDOW_S:
            self.new_window()
        idle = load.kv_usage is not None and load.kv_usage < _GROWTH_KV_USAGE
        quiet = load.num_waiting == 0 and load.num_preemptions == 0 and idle
        self._growth_left_s = _GROWTH_GATE_S if quiet else self._growth_left_s - load.seconds
        self._num_queueing_reports = (
            self._num_queueing_reports + 1 if load.num_waiting > num_in_flight / 3 else 0
        )
        self._cooldown = max(0, self._cooldown - 1)
        return self._cut(load, num_in_flight)

    def _cut(self, load: EngineLoad, num_in_flight: int) -> bool:
        kv_usage = load.kv_usage or 0.0
        overloaded = load.num_preemptions > 0 or kv_usage > _HARD_KV_USAGE
        if overloaded and self._cooldown == 0:
            share = 0.8 if load.num_preemptions > 0 else _TARGET_KV_USAGE / kv_usage
        elif kv_usage > _SOFT_KV_USAGE and self._cooldown == 0:
            share = _TARGET_KV_USAGE / kv_usage
        elif self._num_queueing_reports >= _COOLDOWN_REPORTS:
            share = 0.9
            self._num_queueing_reports = 0
        else:
            return False
        self._cooldown = _COOLDOWN_REPORTS
        self._growth_left_s = 0.0
        self._set(num_in_flight * share)
        return overloaded

    def _set(self, value: float) -> None:
        self.value = min(max(value, float(self._least)), float(self._most))


_TARGET_LAG = 1


@dataclass(frozen=True, slots=True)
class PrimeRlSettings(PolicySettings):
    """Parameters of `prime_rl`."""

    eta: int = whole(8, at_least=0)
    """Oldest age of a trained group in versions (prime-rl `max_off_policy_steps`), at least 0."""
    max_inflight: int = 1024
    """Upper end of the adaptive cap, trajectories (prime-rl `concurrency.max_inflight`)."""
    min_inflight: int = whole(1, at_least=1)
    """Lower end of the adaptive cap, trajectories (prime-rl `concurrency.min_inflight`)."""
    initial_inflight: int | None = optional_whole(at_least=1)
    """The cap at the start, trajectories (prime-rl `concurrency.initial_inflight`); unset is one
    batch. prime-rl itself starts with the KV tokens of all generators divided by the longest
    sequence.
    """
    group_size: int = whole(8, at_least=1)
    """Trajectories per group."""
    max_ready: int | None = optional_whole(at_least=1)
    """Finished groups that wait at most before admission stops; unset is eta + 2 batches, more than
    can ever be trained.
    """

    def __post_init__(self) -> None:
        PolicySettings.__post_init__(self)
        check_whole("max_inflight", self.max_inflight, self.min_inflight)


class PrimeRl(TrajectoryPolicy):
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
        has_room = len(self.groups.ready) < self._max_ready and self._cap.admits(self.num_in_flight)
        return has_room and lag <= min(_TARGET_LAG, self.settings.eta)

    def admitted(self, group: str) -> None:
        super().admitted(group)
        self._cap.opened(self.settings.group_size)

    def trajectory_finished(self, group: str) -> None:
        in_flight = self.num_in_flight
        super().trajectory_finished(group)
        if self.num_in_flight < in_flight:
            self._cap.completed(in_flight)

    def published(self, version: int) -> tuple[str, ...]:
        super().published(version)
        self._cap.new_window()
        return self.cancel(self.groups.running_before(self._collecting() - self.settings.eta))

    def observe(self, load: EngineLoad) -> tuple[str, ...]:
        youngest: list[str] = []
        if self._cap.observe(load, self.num_in_flight):
            excess = self.num_in_flight - int(self._cap.value)
            # The slice leaves out the oldest running group: one must always make progress.
            candidates = list(self.groups.running)[:0:-1]
            youngest = candidates[: max(0, excess // self.settings.group_size)]
        return self.cancel(tuple(youngest))

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

    def _collecting(self) -> int:
        return max(self.num_taken // self.groups_per_step, self.version)
