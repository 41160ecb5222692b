"""The measurements of one simulated run."""

from dataclasses import dataclass, field

_BIN_TOKENS = 16


@dataclass
class SimulationOutcome:
    """Counters of one run. Memory does not grow with the number of steps.

    Example: 10 steps of 128 trajectories, trained_tokens 11.6 million, wall_seconds 6100.
    """

    wall_seconds: float = 0.0
    num_steps: int = 0
    trained_tokens: int = 0
    dropped_tokens_l2: int = 0
    """Tokens generated for groups that were cancelled while they ran."""
    dropped_tokens_l3: int = 0
    """Tokens generated for finished groups that were dropped at batch assembly."""
    num_preemptions: int = 0
    num_refilled_tokens: int = 0
    trainer_idle_seconds: float = 0.0
    tokens_by_staleness: dict[int, int] = field(default_factory=dict)
    trajectories_by_staleness: dict[int, int] = field(default_factory=dict)
    batches_by_max_staleness: dict[int, int] = field(default_factory=dict)
    trained_lengths: dict[int, int] = field(default_factory=dict)
    """Trajectories by full length, in bins of 16 tokens."""
    dropped_lengths: dict[int, int] = field(default_factory=dict)
    running_seconds: float = 0.0
    """Running sequences on the engines, integrated over time."""
    kv_usage_seconds: float = 0.0
    """Share of the KV blocks in use, mean over the engines, integrated over time."""

    @property
    def generated_tokens(self) -> int:
        """Trained and dropped; what is still in flight at the end counts for neither."""
        return self.trained_tokens + self.dropped_tokens_l2 + self.dropped_tokens_l3

    @property
    def num_trajectories(self) -> int:
        return sum(self.trained_lengths.values()) + sum(self.dropped_lengths.values())

    @property
    def max_staleness(self) -> int:
        return max(self.tokens_by_staleness, default=0)

    @property
    def effective_tokens_per_second(self) -> float:
        return self.trained_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        return self.generated_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def mean_running(self) -> float:
        return self.running_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def mean_kv_usage(self) -> float:
        return self.kv_usage_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def waste_l2(self) -> float:
        return self._share(self.dropped_tokens_l2)

    @property
    def waste_l3(self) -> float:
        return self._share(self.dropped_tokens_l3)

    @property
    def waste(self) -> float:
        return self._share(self.dropped_tokens_l2 + self.dropped_tokens_l3)

    @property
    def preemptions_per_trajectory(self) -> float:
        return self.num_preemptions / max(1, self.num_trajectories)

    @property
    def reprefill_tokens_per_trajectory(self) -> float:
        return self.num_refilled_tokens / max(1, self.num_trajectories)

    @property
    def drop_rate(self) -> float:
        return sum(self.dropped_lengths.values()) / max(1, self.num_trajectories)

    @property
    def drop_enrichment(self) -> float | None:
        """Drop rate of the longest tenth of all trajectories over that of all; None without
        drops.
        """
        if not self.dropped_lengths:
            return None
        tenth = self.num_trajectories / 10
        longest = dropped = 0.0
        for length in sorted({*self.trained_lengths, *self.dropped_lengths}, reverse=True):
            here_dropped = self.dropped_lengths.get(length, 0)
            here = here_dropped + self.trained_lengths.get(length, 0)
            share = min(1.0, (tenth - longest) / here)
            longest += share * here
            dropped += share * here_dropped
            if longest >= tenth:
                break
        return dropped / longest / self.drop_rate

    @property
    def dropped_length_ratio(self) -> float | None:
        """Mean full length of dropped over that of trained trajectories; None without drops."""
        if not self.dropped_lengths or not self.trained_lengths:
            return None
        return _mean(self.dropped_lengths) / _mean(self.trained_lengths)

    def batches_over(self, limit: int) -> int:
        """Returns the number of batches with a trajectory older than `limit`."""
        return sum(
            number
            for staleness, number in self.batches_by_max_staleness.items()
            if staleness > limit
        )

    def _share(self, tokens: int) -> float:
        return tokens / max(1, self.generated_tokens)


def count_length(lengths: dict[int, int], tokens: int) -> None:
    count(lengths, tokens // _BIN_TOKENS * _BIN_TOKENS)


def count(histogram: dict[int, int], key: int, number: int = 1) -> None:
    histogram[key] = histogram.get(key, 0) + number


def _mean(lengths: dict[int, int]) -> float:
    return sum(length * number for length, number in lengths.items()) / sum(lengths.values())
