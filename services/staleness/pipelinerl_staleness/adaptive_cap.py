"""The adaptive concurrency cap of prime-rl: multiplicative growth with completions, cuts on
overload.
"""

from pipelinerl_staleness.policy import EngineLoad

_GROWTH_PER_TURNOVER = 1.25
_GROWTH_KV_USAGE = 0.6
_GROWTH_GATE_S = 15.0
_SOFT_KV_USAGE = 0.8
_HARD_KV_USAGE = 0.9
_TARGET_KV_USAGE = 0.7
_COOLDOWN_REPORTS = 6
_BURST_WINDOW_S = 5.0


class AdaptiveCap:
    """Most trajectories in flight. Grows by a quarter per turnover while the last report was quiet
    and the cap is used; is cut to what would use 70 % of the KV blocks when they run full, to 80 %
    of the running ones after preemptions and to 90 % when requests keep queueing.

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
        """One trajectory finished by itself, of `num_in_flight` before it."""
        if self._burst_left is not None:
            self._burst_left += 1
        if self._growth_left_s > 0 and num_in_flight >= 0.9 * int(self.value):
            self._set(self.value * _GROWTH_PER_TURNOVER ** (1 / num_in_flight))

    def new_window(self) -> None:
        if self._burst_left is not None:
            self._burst_left = max(float(self._group_size), self.value // 10)
        self._window_s = 0.0

    def observe(self, load: EngineLoad, num_in_flight: int) -> bool:
        """Adapts to a report. Whether trajectories over the new cap are to be cancelled, youngest
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
