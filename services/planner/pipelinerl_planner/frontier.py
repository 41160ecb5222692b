"""The search over (H, I): there is no closed form for the best pair (appendix A.3), so all of them
are tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl_planner.throughput import (
    Throughput,
    Workload,
    conventional,
    conventional_steps,
    max_lags,
)
from pipelinerl_planner.throughput import lag as exact_lag

BATCH_STEP = 8
"""Above 8, only multiples of 8 are tried as H: engines capture their graphs for such batches."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What is tried. Example: 128 GPUs, each a generator's: I = 1, 2, ..., 127."""

    most_per_gpu: int = 512
    """Largest H."""
    gpus_per_actor: int = 1
    """I is a multiple of this."""
    max_lag: int | None = None
    """Largest g_max; None for any."""

    def num_pairs(self, num_gpus: int) -> int:
        """How many pairs (H, I) are tried. Example: 128 GPUs and H up to 512: 71 * 127 = 9,017."""
        num_batches = min(self.most_per_gpu, BATCH_STEP) + max(
            self.most_per_gpu // BATCH_STEP - 1, 0
        )
        return num_batches * ((num_gpus - 1) // self.gpus_per_actor)


@dataclass(frozen=True, slots=True)
class Point:
    """A pair that no pair of smaller or equal lag beats.

    Example: H=192, I=44, g_max=132 (131.9), 16.9 tokens/flash, speed-up 1.57.
    """

    batch_per_gpu: int
    num_generating: int
    max_lag: int
    lag: float
    """`max_lag` before it is rounded up."""
    throughput: Throughput
    speedup: float
    """Over conventional RL with the same largest lag."""

    @property
    def in_progress(self) -> int:
        """Sequences decoded at once by all generators: H * I."""
        return self.batch_per_gpu * self.num_generating


def frontier(load: Workload, grid: Grid) -> tuple[Point, ...]:
    """Pairs in the order of rising lag and throughput; empty when none keeps the largest lag.

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
    points: list[Point] = []
    best = 0.0
    for index in np.lexsort((pairs_HI.ravel(), -rate_HI.ravel(), lags_HI.ravel())):
        h, i = divmod(int(index), len(generating))
        lag, rate = int(lags_HI[h, i]), float(rate_HI[h, i])
        if grid.max_lag is not None and lag > grid.max_lag:
            break
        if rate > best * (1 + 1e-9):
            best = rate
            slower = conventional(load, conventional_steps(lag)).r
            throughput = Throughput(float(gen_HI[h, i]), float(train_HI[h, i]), rate)
            pair = int(batch[h]), int(generating[i])
            points.append(
                Point(*pair, lag, exact_lag(load, pair[0] * pair[1]), throughput, rate / slower)
            )
    return tuple(points)


def chosen(points: Sequence[Point], max_lag: int | None) -> Point:
    """The fastest pair within a given lag; without one, the pair of the greatest speed-up."""
    return points[-1] if max_lag is not None else max(points, key=lambda point: point.speedup)
