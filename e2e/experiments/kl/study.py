"""The comparison of the paper's section 5.1 (arXiv 2509.19128, figure 7), from one checkpoint on.

by lag g    KL(mu || pi of g steps later). Conventional: mu is the first checkpoint alone, over all
            tokens. In flight: mu is the first checkpoint and those that followed it up to the
            g-th, over the tokens until the next change.
by token    KL(mu || pi of max_lag steps later) along whole sequences, in blocks that are as long as
            the tokens between two changes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.kl.divergence import Estimate, equivalent_lag
from experiments.kl.engines import Samples, Schedule, Studied
from pipelinerl_actor.generator.engine import KVCache

CONVENTIONAL, KEPT, RECOMPUTED = "conventional", "in flight, KV kept", "in flight, KV recomputed"
KV_CACHES = {KEPT: KVCache.KEEP, RECOMPUTED: KVCache.RECOMPUTE}


@dataclass(frozen=True)
class Result:
    """The results from one start, in nats per token."""

    start: int
    schedule: Schedule
    swaps: dict[str, list[float]]
    """The number of tokens after which the weights changed, by method."""
    by_lag: dict[str, list[Estimate]]
    """Divergence at lags 0 to max_lag, by method."""
    by_token: dict[str, list[Estimate]]
    """Divergence in blocks of `schedule.interval` tokens, by method; conventional sampling also for
    half of the largest lag.
    """
    excess: list[Estimate]
    """Excess of kept over recomputed KV at lags 0 to max_lag, between sequences of the same prompt
    and seed.
    """

    @property
    def equivalent_lags(self) -> dict[str, float | None]:
        """The conventional lag that is as far from on-policy as each in-flight method at the
        largest lag.
        """
        curve = [estimate.mean for estimate in self.by_lag[CONVENTIONAL]]
        return {method: equivalent_lag(curve, self.by_lag[method][-1].mean) for method in KV_CACHES}

    def rows(self) -> list[dict[str, Any]]:
        """The results for a JSON file."""
        lags = [
            {"start": self.start, "method": method, "lag": lag, **asdict(estimate)}
            for method, estimates in self.by_lag.items()
            for lag, estimate in enumerate(estimates)
        ]
        step = self.schedule.interval
        tokens = [
            {
                "start": self.start,
                "method": method,
                "tokens": [block * step, (block + 1) * step],
                **asdict(estimate),
            }
            for method, estimates in self.by_token.items()
            for block, estimate in enumerate(estimates)
        ]
        swaps = [
            {
                "start": self.start,
                "method": method,
                "swapped_after": after,
                "equivalent_lag": self.equivalent_lags[method],
            }
            for method, after in self.swaps.items()
        ]
        excess = [
            {"start": self.start, "excess_of": KEPT, "lag": lag, **asdict(estimate)}
            for lag, estimate in enumerate(self.excess)
        ]
        return lags + tokens + swaps + excess


async def study(
    studied: Studied, schedule: Schedule, start: int, prompts_NP: Tensor, say: Callable[[str], None]
) -> Result:
    """Samples with every method, then compares with one checkpoint after another. `say` receives
    lines on the progress.
    """
    samples: dict[str, Samples] = {}
    for method in (CONVENTIONAL, *KV_CACHES):
        began = time.monotonic()
        swaps: Sequence[int] = schedule.swaps if method in KV_CACHES else ()
        kv_cache = KV_CACHES.get(method, KVCache.KEEP)
        samples[method] = await studied.sample(
            prompts_NP, schedule.num_tokens, start, swaps, kv_cache
        )
        say(
            f"start={start} {method}: {len(prompts_NP)} x {schedule.num_tokens} tokens in "
            f"{time.monotonic() - began:.0f} s"
        )
    divergences: dict[str, list[Tensor]] = {method: [] for method in samples}
    for lag in range(schedule.max_lag + 1):
        await studied.compare_with(start + lag)
        for method, each in samples.items():
            divergences[method].append(await studied.divergence(each))
    swapped = {method: samples[method].swaps() for method in KV_CACHES}
    result = Result(start, schedule, swapped, *_curves(divergences, schedule))
    for line in _summary(result):
        say(line)
    return result


def _curves(
    divergences: dict[str, list[Tensor]], schedule: Schedule
) -> tuple[dict[str, list[Estimate]], dict[str, list[Estimate]], list[Estimate]]:
    """Means by lag, means by token, and the excess of kept KV by lag, of each method's divergences
    [N, T] by lag.
    """
    until = {
        method: [each[:, : schedule.end(lag)] for lag, each in enumerate(divergences[method])]
        for method in KV_CACHES
    }
    until[CONVENTIONAL] = divergences[CONVENTIONAL]
    by_lag = {method: [Estimate.of(each) for each in until[method]] for method in divergences}
    excess = [
        Estimate.of(kept - recomputed)
        for kept, recomputed in zip(until[KEPT], until[RECOMPUTED], strict=True)
    ]
    half = schedule.max_lag // 2
    along = {f"{CONVENTIONAL}, lag {schedule.max_lag}": divergences[CONVENTIONAL][-1]}
    along |= {method: divergences[method][-1] for method in KV_CACHES}
    along[f"{CONVENTIONAL}, lag {half}"] = divergences[CONVENTIONAL][half]
    by_token = {
        name: [Estimate.of(block) for block in torch.split(each, schedule.interval, 1)]
        for name, each in along.items()
    }
    return by_lag, by_token, excess


def _summary(result: Result) -> list[str]:
    lines = []
    for method, estimates in result.by_lag.items():
        shown = sorted({1, result.schedule.max_lag // 2, result.schedule.max_lag})
        values = "  ".join(
            f"lag {g}: {estimates[g].mean:.3g} [{estimates[g].low:.3g}, {estimates[g].high:.3g}]"
            for g in shown
        )
        equivalent = result.equivalent_lags.get(method)
        as_far = "" if equivalent is None else f"  as far as conventional lag {equivalent:.1f}"
        lines.append(f"start={result.start} {method}: {values}{as_far}")
    last = result.excess[-1]
    lines.append(
        f"start={result.start} old KV adds {last.mean:.3g} [{last.low:.3g}, {last.high:.3g}] at "
        "the largest lag"
    )
    return lines
