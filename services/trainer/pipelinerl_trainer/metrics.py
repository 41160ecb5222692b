"""The metrics of one optimizer step, typed, and their reduction over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from pipelinerl_common.metrics.catalog import MAX_LAG_BUCKET
from pipelinerl_common.types import MicroBatch
from pipelinerl_trainer.objective import RowLoss
from pipelinerl_trainer.ranks import Ranks

MAX_LAG_BIN = MAX_LAG_BUCKET + 1
"""Tokens with this lag or more share the histogram's last bin."""

LAG_BINS = (
    *(f"lag_histogram_{lag}" for lag in range(MAX_LAG_BIN)),
    f"lag_histogram_{MAX_LAG_BIN}_plus",
)
"""Names of the histogram's bins: tokens by lag."""


class StepMetric:
    """A metric whose fields are numbers, which `reduce` sums over ranks by default."""

    def load(self, rows_RK: Tensor) -> None:
        """Takes the combination of all ranks' numbers; row r has rank r's."""
        self.store(self._combine(rows_RK).tolist())

    def _combine(self, rows_RK: Tensor) -> Tensor:
        return rows_RK.sum(0)

    def numbers(self) -> list[float]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def store(self, numbers: Sequence[float]) -> None:
        for each, number in zip(fields(self), numbers, strict=True):  # type: ignore[arg-type]
            setattr(self, each.name, number)


@dataclass
class Total(StepMetric):
    """A sum."""

    value: float = 0.0

    def add(self, amount: float) -> None:
        self.value += amount


@dataclass
class Maximum(StepMetric):
    """The largest value; 0 when nothing was added."""

    value: float = 0.0

    def add(self, value: float) -> None:
        self.value = max(self.value, value)

    def _combine(self, rows_RK: Tensor) -> Tensor:
        return rows_RK.max(0).values


@dataclass
class Mean(StepMetric):
    """A mean over tokens or sequences; 0 when there were none."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class EffectiveSampleSize(StepMetric):
    """(sum w)^2 / (N sum w^2), in (0, 1]; 1 when all weights are equal, as they are on-policy. 0
    when there were none.

    Source: PipelineRL (arXiv 2509.19128), equation 6.
    """

    sum_w: float = 0.0
    sum_w2: float = 0.0
    count: float = 0.0

    def add(self, sum_w: float, sum_w2: float, count: float) -> None:
        self.sum_w += sum_w
        self.sum_w2 += sum_w2
        self.count += count

    @property
    def value(self) -> float:
        return self.sum_w**2 / (self.count * self.sum_w2) if self.sum_w2 else 0.0


@dataclass
class LagHistogram(StepMetric):
    """Tokens by lag: the version that trains them minus the version that sampled them."""

    bins: list[float] = field(default_factory=lambda: [0.0] * (MAX_LAG_BIN + 1))

    def add(self, lag: int, num_tokens: int) -> None:
        self.bins[min(max(lag, 0), MAX_LAG_BIN)] += num_tokens

    def numbers(self) -> list[float]:
        return list(self.bins)

    def store(self, numbers: Sequence[float]) -> None:
        self.bins = list(numbers)

    def values(self) -> dict[str, float]:
        return dict(zip(LAG_BINS, self.bins, strict=True))


@dataclass
class StepMetrics:
    """All metrics of a step: one rank's until `reduce`, those of all ranks after it."""

    loss: Total = field(default_factory=Total)
    num_trained_tokens: Total = field(default_factory=Total)
    non_finite_micro_batches: Total = field(default_factory=Total)
    lag_mean: Mean = field(default_factory=Mean)
    lag_max: Maximum = field(default_factory=Maximum)
    entropy: Mean = field(default_factory=Mean)
    kl_ref: Mean = field(default_factory=Mean)
    kl_behavior: Mean = field(default_factory=Mean)
    """Divergence of the policy from the distribution that sampled the tokens: the mean of
    w - 1 - log w, never negative.
    """
    ratio_mean: Mean = field(default_factory=Mean)
    ratio_max: Maximum = field(default_factory=Maximum)
    clip_fraction: Mean = field(default_factory=Mean)
    value_error: Mean = field(default_factory=Mean)
    ess: EffectiveSampleSize = field(default_factory=EffectiveSampleSize)
    ess_truncated: EffectiveSampleSize = field(default_factory=EffectiveSampleSize)
    lag_histogram: LagHistogram = field(default_factory=LagHistogram)

    OPTIONAL: ClassVar[tuple[str, ...]] = ("kl_ref", "value_error")
    """Metrics that `values` omits when nothing was added, because 0 would be wrong."""

    def add_row(self, batch: MicroBatch, step: int, row: RowLoss, loss: float) -> None:
        """Adds a row; `loss` is its share of the step's loss. A row whose loss is not finite only
        counts as such.
        """
        self.num_trained_tokens.add(batch.num_trained)
        self._add_lags(batch, step)
        if loss != loss or abs(loss) == float("inf"):
            self.non_finite_micro_batches.add(1)
            return
        self.loss.add(loss)
        self._add_tokens(row)

    def _add_lags(self, batch: MicroBatch, step: int) -> None:
        for run in batch.version_runs:
            lag = step - run.policy_version
            self.lag_mean.add(lag * run.num_tokens, run.num_tokens)
            self.lag_max.add(lag)
            self.lag_histogram.add(lag, run.num_tokens)

    def _add_tokens(self, row: RowLoss) -> None:
        w_T, effective_T = row.ratios_T.double(), row.policy.effective_weights_T.double()
        nothing_T = torch.zeros_like(w_T)
        columns = [
            w_T,
            w_T**2,
            effective_T,
            effective_T**2,
            row.policy.clipped_T,
            row.entropy_T,
            nothing_T if row.kl_T is None else row.kl_T,
            nothing_T if row.value_error_T is None else row.value_error_T,
            w_T - 1.0 - torch.log(w_T),
        ]
        sums = torch.stack([column.double().sum() for column in columns]).tolist()
        count = len(w_T)
        self.ess.add(sums[0], sums[1], count)
        self.ess_truncated.add(sums[2], sums[3], count)
        self.ratio_mean.add(sums[0], count)
        self.ratio_max.add(float(w_T.max()) if count else 0.0)
        self.clip_fraction.add(sums[4], count)
        self.entropy.add(sums[5], count)
        self.kl_ref.add(sums[6], 0 if row.kl_T is None else count)
        self.value_error.add(sums[7], 0 if row.value_error_T is None else count)
        self.kl_behavior.add(sums[8], count)

    def reduce(self, ranks: Ranks) -> None:
        """Combines all metrics over the ranks in one collective."""
        metrics: list[StepMetric] = [getattr(self, each.name) for each in fields(self)]
        states = [metric.numbers() for metric in metrics]
        rows_RK = ranks.gather([number for state in states for number in state])
        start = 0
        for metric, state in zip(metrics, states, strict=True):
            metric.load(rows_RK[:, start : start + len(state)])
            start += len(state)

    def values(self) -> dict[str, float]:
        """Returns the values by the names of the run's metrics."""
        named = {
            each.name: float(getattr(self, each.name).value)
            for each in fields(self)
            if each.name != "lag_histogram"
        }
        for name in self.OPTIONAL:
            if not getattr(self, name).count:
                del named[name]
        return named | self.lag_histogram.values()
