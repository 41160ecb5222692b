"""Number of actors while `autoscale` is on: the planner's schedules, kept from overshooting.

```
 rule     starts at actors.replicas and follows the ratio of the balance
 hybrid   starts at actors.maxReplicas for the first exploreSteps, continues with splitShare of the
          GPUs, and follows the ratio from there
```
The rule alone oscillates when one step leads from one side of its band to the other. Here a step
ends where the measured rates balance: removing actors leaves generation at least as fast as the
system, adding actors leaves the ratio at least at lowRatio. While the rates do not change, a number
that was given up is therefore never asked for again. No actor is removed while the trainers wait as
well, because then the staleness policy holds up both.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pipelinerl_common.settings import JobSpec
from pipelinerl_common.settings.base import Settings
from pipelinerl_control.balance import Balance
from pipelinerl_planner.controllers import (
    HybridPhase,
    HybridSchedule,
    HybridSettings,
    Share,
    ShareRule,
    ShareRuleSettings,
)

_ROUNDING = 1e-9

Count = Annotated[int, Field(ge=0)]


class ScalingChoice(Settings):
    """The number of actors chosen by autoscale; absent while a hybrid schedule explores."""

    actors: Count
    """Number of actors that should exist. Remembered."""
    start: Count
    """The spec.actors.replicas that it started from; a change restarts it. Remembered."""
    step: Count
    """Optimizer step of the last decision. Remembered."""
    ratio: float | None = None
    """Throughput of the system divided by that of generation alone, at the last decision."""


@dataclass(frozen=True, slots=True)
class Look:
    """A decision. `why` explains a new number to people; empty when the number stays the same."""

    choice: ScalingChoice
    why: str


def num_actors(spec: JobSpec, choice: ScalingChoice | None) -> int:
    """Number of actors that should exist: the choice, unless `actors.replicas` changed since."""
    actors, settings = spec.actors, spec.autoscale
    if not settings.enabled or actors.max_replicas is None:
        return actors.replicas
    if choice is None:
        return actors.max_replicas if settings.schedule == "hybrid" else actors.replicas
    if choice.start != actors.replicas:
        return actors.replicas
    return min(max(choice.actors, actors.min_replicas), actors.max_replicas)


def look(
    spec: JobSpec, choice: ScalingChoice | None, step: int | None, balance: Balance | None
) -> Look | None:
    """The next decision after `step` steps with `balance` since the last one; None while it is too
    early.
    """
    before = num_actors(spec, choice)
    if choice is None and spec.autoscale.schedule == "hybrid":
        return None if step is None else _end_of_exploring(spec, before, step)
    if balance is None or balance.num_actors != before or _has_been_looked_at(balance, choice):
        return None
    chosen = choose(spec, before, balance)
    if chosen is None:
        return None
    after = ScalingChoice(
        actors=chosen, start=spec.actors.replicas, step=balance.step, ratio=round(balance.ratio, 3)
    )
    return Look(after, _why(spec, before, chosen, balance))


def choose(spec: JobSpec, before: int, balance: Balance) -> int | None:
    """Number of actors for a `balance` measured with `before`; None while the period lasts."""
    settings, gpus = spec.autoscale, _gpus_per_actor(spec)
    share = ShareRule(_rule(spec)).observe(
        Share(before * gpus, balance.begin_step), balance.step, balance.r, balance.r_gen
    )
    if share.decided_at == balance.begin_step:
        return None
    asked = share.num_generating // gpus
    if asked < before:
        if balance.r < settings.low_ratio * balance.r_train:
            return before
        return min(before, max(asked, math.ceil(before * balance.ratio - _ROUNDING)))
    if asked > before:
        enough = before * balance.r_train / (balance.r_gen * settings.low_ratio)
        return asked if enough >= asked else max(before, math.floor(enough + _ROUNDING))
    return before


def _end_of_exploring(spec: JobSpec, before: int, step: int) -> Look | None:
    settings, rule, gpus = spec.autoscale, _rule(spec), _gpus_per_actor(spec)
    schedule = HybridSchedule(HybridSettings(rule, settings.explore_steps, settings.split_share))
    state = schedule.observe(schedule.initial(), step, 0.0, 0.0)
    if state.phase is HybridPhase.EXPLORE:
        return None
    chosen = round(state.share.num_generating / gpus)
    why = (
        f"actors {before} -> {chosen}: the {settings.explore_steps} steps in which every actor "
        "generates are over "
        f"(step {step}); from here on it is splitShare={settings.split_share} of {rule.num_gpus} "
        "places, trainers included"
    )
    return Look(
        ScalingChoice(actors=chosen, start=spec.actors.replicas, step=step),
        why if chosen != before else "",
    )


def _rule(spec: JobSpec) -> ShareRuleSettings:
    """The rule in GPUs; without GPUs an actor and a trainer rank count as one each.

    The trainers are a gang of a fixed size.
    """
    settings, actors, gpus = spec.autoscale, spec.actors, _gpus_per_actor(spec)
    num_training = spec.trainers.replicas * spec.trainers.processes_per_node
    return ShareRuleSettings(
        num_gpus=spec.most_actors * gpus + num_training,
        least=actors.min_replicas * gpus,
        least_training=num_training,
        period_steps=settings.period_steps,
        low_ratio=settings.low_ratio,
        high_ratio=settings.high_ratio,
        take_away=math.ceil(settings.take_away_gpus / gpus) * gpus,
        add=math.ceil(settings.add_gpus / gpus) * gpus,
    )


def _gpus_per_actor(spec: JobSpec) -> int:
    return spec.actors.gpus_per_replica or 1


def _has_been_looked_at(balance: Balance, last: ScalingChoice | None) -> bool:
    """Whether the period contains the last decision, as after a return to a checkpoint."""
    return last is not None and balance.begin_step < last.step <= balance.step


def _why(spec: JobSpec, before: int, chosen: int, balance: Balance) -> str:
    if chosen == before:
        return ""
    settings = spec.autoscale
    if chosen > before:
        cause = (
            f"trainers wait for samples (ratio {balance.ratio:.3f}, above "
            f"highRatio={settings.high_ratio})"
        )
    else:
        cause = (
            f"generators wait for the trainers (ratio {balance.ratio:.3f}, below "
            f"lowRatio={settings.low_ratio})"
        )
    return (
        f"actors {before} -> {chosen}: {cause}; in steps {balance.begin_step} to {balance.step} "
        f"{balance.r:.3g} groups per "
        f"second were taken of the {balance.r_gen:.3g} that generation can make, without waiting "
        "it would be "
        f"{balance.r_train:.3g}"
    )
