"""The throughput model of the PipelineRL paper (arXiv 2509.19128, appendix A).

A flash is the time that one token's forward pass takes at a GPU's peak: FLOPs of the pass / peak
FLOP/s. All throughputs are in tokens per flash, over all N GPUs.

    N     GPUs; I of them generate in in-flight RL, the others train
    B     sequences of one optimizer step
    H     sequences that one generating GPU decodes at once
    G     optimizer steps of one round of conventional RL, which generates S = B*G sequences at a time
    L     longest response, `mean` its mean length, in tokens
    tau   flashes of one GPU to train one token
    U(h)  utilisation at h sequences per GPU
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from pipelinerl_planner.length_distribution import LengthDistribution
from pipelinerl_planner.utilization import Utilization

Integers = NDArray[np.int64]

_ROUNDING = 1e-9
"""Keeps ratios that are whole numbers from being rounded up by one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is planned for. Example: the paper's case study is 128 GPUs, 128 sequences a step,
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
    """In tokens per flash. Example, conventional RL in the case study: 18.3, 26.02, 10.7."""

    r_gen: float
    r_train: float
    r: float


def conventional(load: Workload, num_steps: int) -> Throughput:
    """Conventional RL with G = `num_steps` optimizer steps a round: first all GPUs generate, then
    all train.

    r_gen = K / sum_{l=1..L} (h(l)/N) / U(h(l)/N), with h(l) = S * P(length >= l) sequences left
    after l tokens and K = S * mean
    r_train = N / tau,  r = 1 / (1/r_gen + 1/r_train)                                          (equations 11 to 13)
    """
    num_sequences = load.batch_size * num_steps
    per_gpu = num_sequences * load.lengths.survival / load.num_gpus
    flashes = float((per_gpu / load.utilization(per_gpu)).sum())
    r_gen = num_sequences * load.lengths.mean / flashes
    r_train = load.num_gpus / load.tau
    return Throughput(r_gen, r_train, 1 / (1 / r_gen + 1 / r_train))


def conventional_steps(max_lag: int) -> int:
    """G of the conventional RL whose last step trains sequences that are `max_lag` steps old."""
    return max_lag + 1


def in_flight(load: Workload, batch_per_gpu: int, num_generating: int) -> Throughput:
    """In-flight RL with H = `batch_per_gpu` and I = `num_generating`; generation and training go on
    at once.

    r_gen = U(H) * I,  r_train = (N - I) / tau,  r = min(r_gen, r_train)                       (equations 14 to 16)
    """
    r_gen = float(load.utilization(batch_per_gpu)) * num_generating
    r_train = (load.num_gpus - num_generating) / load.tau
    return Throughput(r_gen, r_train, min(r_gen, r_train))


def lag(load: Workload, in_progress: int) -> float:
    """g_max before it is rounded up: H * I * L / (mean * B). With B=2048 the case study's is 8.25:
    "about 8".
    """
    return in_progress * load.lengths.longest / (load.lengths.mean * load.batch_size)


def max_lag(load: Workload, batch_per_gpu: int, num_generating: int) -> int:
    """g_max = ceil(H * I * L / (mean * B)), in optimizer steps: while the longest response is
    generated, the generators finish H * I * L / mean sequences (appendix A.3).
    """
    return int(max_lags(load, np.asarray(batch_per_gpu * num_generating))[()])


def max_lags(load: Workload, in_progress: Integers) -> Integers:
    """g_max for each number of sequences in progress, H * I."""
    steps = in_progress * load.lengths.longest / (load.lengths.mean * load.batch_size)
    lags: Integers = np.ceil(steps - _ROUNDING).astype(np.int64)
    return lags


def least_batch_size(load: Workload, in_progress: int, lag: int) -> int:
    """B that brings g_max down to `lag` with H * I = `in_progress`."""
    return ceil(in_progress * load.lengths.longest / (load.lengths.mean * lag) - _ROUNDING)


CASE_GPUS, CASE_BATCH, CASE_LENGTHS, CASE_TAU = 128, 128, "uniform:1:2048", 4.92
"""The paper's case study (appendix A.4); its longest length is left open and hardly matters."""
