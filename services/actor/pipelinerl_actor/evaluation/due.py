"""Which checkpoint is evaluated next. Pure.

every 20 of 60 steps, evaluated: none      there: 0, 10, 20, 30, 40   ->  0, the initial weights, which nothing overtakes
                      evaluated: 0         there: 10, 20, 30, 40      ->  40, and 20 is overtaken
                      evaluated: 0, 40     there: 50, 60              ->  60, the last step, which is always due
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pipelinerl_common.settings import EvaluationSettings

START = 0
"""The step of the initial weights."""


@dataclass(frozen=True, slots=True)
class Choice:
    step: int
    overtaken: tuple[int, ...] = ()
    """Steps that were due since the newest evaluated one and will not be evaluated."""


def choose(
    settings: EvaluationSettings, last_step: int, there: Iterable[int], evaluated: Collection[int]
) -> Choice | None:
    """The newest due step of the checkpoints that are `there`, which come newest first; None
    without one.

    `last_step` is the run's.
    """
    if settings.at_start and START not in evaluated:
        return Choice(START)
    newest = max(evaluated, default=START)
    chosen = next(
        (step for step in there if step > newest and is_due(settings, last_step, step)), None
    )
    if chosen is None:
        return None
    first = newest - newest % settings.every_steps + settings.every_steps
    return Choice(chosen, tuple(range(first, chosen, settings.every_steps)))


def is_due(settings: EvaluationSettings, last_step: int, step: int) -> bool:
    return step >= last_step or step % settings.every_steps == 0


def is_over(last_step: int, evaluated: Iterable[int]) -> bool:
    """Nothing more will be due."""
    return max(evaluated, default=START) >= last_step
