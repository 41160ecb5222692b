"""The throughput model of the PipelineRL paper (arXiv 2509.19128, appendix A).

A flash is the time that one token's forward pass takes at a GPU's peak: FLOPs of the pass / peak
FLOP/s. All throughputs are in tokens per flash, over all N GPUs.

    N     GPUs; I of them generate in in-flight RL, the others train
    B     sequences of one optimizer step
    H     sequences that one generating GPU decodes at once
    G     optimizer steps of one round of conventional RL, which generates S = B*G sequences at once
    L     longest response, `mean` its mean length, in tokens
    tau   flashes of one GPU to train one token
    U(h)  utilisation at h sequences per GPU

The best pair (H, I) has no closed form (appendix A.3), so `frontier` tries all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from pipelinerl_planner.lengths import LengthDistribution
from pipelinerl_planner.utilization import Utilization

Integers = NDArray[np.int64]

_ROUNDING = 1e-9
"""Keeps ratios that are whole numbers from being rounded up by one."""


@dataclass(frozen=True, slots=True)
class PlanWorkload:
    """The workload of a plan. Example: the paper's case study is 128 GPUs, 128 sequences a step,
    lengths 1..L, tau 4.92.
    """

    num_gpus: int
    """N"""
    batch_size: int
    """B"""
    lengths: LengthDistribution
    tau: float
    utilization: Utilization


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughputs in tokens per flash. Example, conventional RL in the case study: 18.3, 26.02,
    10.7.
    """

    r_gen: float
    r_train: float
    r: float


def conventional(load: PlanWorkload, num_steps: int) -> Throughput:
    """Returns the throughput of conventional RL with G = `num_steps` optimizer steps a round: first
    all GPUs generate, then all train.

    r_gen = K / sum_{l=1..L} (h(l)/N) / U(h(l)/N), with h(l) = S * P(length >= l) sequences left
    after l tokens and K = S * mean
    r_train = N / tau,  r = 1 / (1/r_gen + 1/r_train)                   (equations 11 to 13)
    """
    num_sequences = load.batch_size * num_steps
    per_gpu = num_sequences * load.lengths.survival / load.num_gpus
    flashes = float((per_gpu / load.utilization(per_gpu)).sum())
    r_gen = num_sequences * load.lengths.mean / flashes
    r_train = load.num_gpus / load.tau
    return Throughput(r_gen, r_train, 1 / (1 / r_gen + 1 / r_train))


def conventional_steps(max_lag: int) -> int:
    """Returns G of the conventional RL whose last step trains sequences `max_lag` steps old."""
    return max_lag + 1


def in_flight(load: PlanWorkload, batch_per_gpu: int, num_generating: int) -> Throughput:
    """Returns the throughput of in-flight RL with H = `batch_per_gpu` and I = `num_generating`,
    which generates and trains concurrently.

    r_gen = U(H) * I,  r_train = (N - I) / tau,  r = min(r_gen, r_train)    (equations 14 to 16)
    """
    r_gen = float(load.utilization(batch_per_gpu)) * num_generating
    r_train = (load.num_gpus - num_generating) / load.tau
    return Throughput(r_gen, r_train, min(r_gen, r_train))


def lag(load: PlanWorkload, in_progress: int) -> float:
    """Returns g_max before it is rounded up: H * I * L / (mean * B). With B=2048 the case study's
    is 8.25: "about 8".
    """
    return in_progress * load.lengths.longest / (load.lengths.mean * load.batch_size)


def max_lag(load: PlanWorkload, batch_per_gpu: int, num_generating: int) -> int:
    """Returns g_max = ceil(H * I * L / (mean * B)), in optimizer steps: while the longest response
    is generated, the generators finish H * I * L / mean sequences (appendix A.3).
    """
    return int(max_lags(load, np.asarray(batch_per_gpu * num_generating))[()])


def max_lags(load: PlanWorkload, in_progress: Integers) -> Integers:
    """Returns g_max for each number of sequences in progress, H * I."""
    steps = in_progress * load.lengths.longest / (load.lengths.mean * load.batch_size)
    lags: Integers = np.ceil(steps - _ROUNDING).astype(np.int64)
    return lags


def least_batch_size(load: PlanWorkload, in_progress: int, lag: int) -> int:
    """Returns the B that lowers g_max to `lag` with H * I = `in_progress`."""
    return ceil(in_progress * load.lengths.longest / (load.lengths.mean * lag) - _ROUNDING)


CASE_GPUS, CASE_BATCH, CASE_LENGTHS, CASE_TAU = 128, 128, "uniform:1:2048", 4.92
"""The paper's case study (appendix A.4); its longest length is left open and hardly matters."""


BATCH_STEP = 8
"""Above 8, only multiples of 8 are tried as H: engines capture their graphs for such batches."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The searched pairs (H, I). Example: 128 GPUs, one per generator: I = 1, 2, ..., 127."""

    most_per_gpu: int = 512
    """Largest H."""
    gpus_per_actor: int = 1
    """I is a multiple of this."""
    max_lag: int | None = None
    """Largest g_max; None for any."""

    def num_pairs(self, num_gpus: int) -> int:
        """Returns the number of pairs. Example: 128 GPUs and H up to 512: 71 * 127 = 9,017."""
        num_batches = min(self.most_per_gpu, BATCH_STEP) + max(
            self.most_per_gpu // BATCH_STEP - 1, 0
        )
        return num_batches * ((num_gpus - 1) // self.gpus_per_actor)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A pair (H, I) that no pair of smaller or equal lag beats.

    Example: H=192, I=44, g_max=132 (131.9), 16.9 tokens/flash, speed-up 1.57.
    """

    batch_per_gpu: int
    num_generating: int
    max_lag: int
    lag: float
    """`max_lag` before it is rounded up."""
    throughput: Throughput
    speedup: float
    """Speed-up over conventional RL with the same largest lag."""

    @property
    def in_progress(self) -> int:
        """Sequences decoded at once by all generators: H * I."""
        return self.batch_per_gpu * self.num_generating


def frontier(load: PlanWorkload, grid: Grid) -> tuple[FrontierPoint, ...]:
    """Returns pairs in the order of rising lag and throughput; none if none keeps the largest lag.

    Of pairs with the same lag and throughput the one with the fewest sequences in progress is
    taken.
    """
    batch = np.array(
        [h for h in range(1, grid.most_per_gpu + 1) if h <= BATCH_STEP or h % BATCH_STEP == 0],
        dtype=np.int64,
    )
    generating = np.arange(grid.gpus_per_actor, load.num_gpus, grid.gpus_per_actor, dtype=np.int64)
    pairs_HI = batch[:, None] * generating[None, :]
    lags_HI = max_lags(load, pairs_HI)
    gen_HI = load.utilization(batch)[:, None] * generating[None, :]
    train_HI = np.broadcast_to((load.num_gpus - generating) / load.tau, gen_HI.shape)
    rate_HI = np.minimum(gen_HI, train_HI)
    points: list[FrontierPoint] = []
    best = 0.0
    for index in np.lexsort((pairs_HI.ravel(), -rate_HI.ravel(), lags_HI.ravel())):
        h, i = divmod(int(index), len(generating))
        largest_lag, rate = int(lags_HI[h, i]), float(rate_HI[h, i])
        if grid.max_lag is not None and largest_lag > grid.max_lag:
            break
        if rate > best * (1 + 1e-9):
            best = rate
            slower = conventional(load, conventional_steps(largest_lag)).r
            throughput = Throughput(float(gen_HI[h, i]), float(train_HI[h, i]), rate)
            pair = int(batch[h]), int(generating[i])
            points.append(
                FrontierPoint(
                    *pair, largest_lag, lag(load, pair[0] * pair[1]), throughput, rate / slower
                )
            )
    return tuple(points)


def chosen(points: Sequence[FrontierPoint], max_lag: int | None) -> FrontierPoint:
    """Returns the fastest pair within a given lag; without one, that of the greatest speed-up."""
    return points[-1] if max_lag is not None else max(points, key=lambda point: point.speedup)
