"""Learning rate by step. A new schedule is one function and one line in `SHAPES`."""

import math
from collections.abc import Callable, Mapping

from pipelinerl_common.settings import OptimizerSettings

Shape = Callable[[float], float]
"""Share of the way from the floor (0) to the peak (1), by the progress after warm-up from 0 to 1.
"""

SHAPES: Mapping[str, Shape] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, num_steps: int, settings: OptimizerSettings) -> float:
    """Of optimizer step `step` (from 0) of `num_steps`.

    Warm-up is linear and its first step is not 0: step s of w warm-up steps has (s + 1) / (w + 1)
    of the peak. After it the shape runs from the peak at the first step to
    `min_learning_rate_ratio` of it at the last.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, num_steps - 1 - warmup)
    floor = settings.min_learning_rate_ratio if settings.schedule != "constant" else 0.0
    share = SHAPES[settings.schedule](min(1.0, progress))
    return settings.learning_rate * (floor + (1.0 - floor) * share)
