"""How many actors there are when `autoscale` is on: the planner's rule, kept from overshooting.

```
 spec.actors.replicas   where it begins, and begins again whenever somebody changes it
 status.autoscale       what was chosen since; written before it is acted on
```
The rule alone swings for ever when one stride leads from one side of its band to the other. Here a stride ends where the
measured rates say that the balance is: taking away leaves generation at least as fast as the system is, adding leaves the
ratio at least at lowRatio. While the rates stay what they are, a number that was taken back is therefore never asked for again.
And nothing is taken away while the trainers wait, too: then it is the staleness policy that holds both up.
"""

import math
from dataclasses import replace

from pipelinerl_common.settings import JobSpec
from pipelinerl_operator.controller.balance import Balance
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.controller.status import AutoscaleStatus, JobStatus
from pipelinerl_operator.objects.pods import pods
from pipelinerl_planner.controllers import Share, ShareRule, ShareRuleSettings

_ROUNDING = 1e-9


def take_choice(draft: Draft) -> None:
    """From here on the job has as many actors as were chosen."""
    wanted = draft.seen.wanted
    if wanted is not None:
        draft.seen = replace(draft.seen, wanted=_with_actors(wanted, num_actors(draft.status, wanted.job.spec)))


def num_actors(status: JobStatus, spec: JobSpec) -> int:
    """The choice, unless it was made for another `actors.replicas`."""
    actors, chosen = spec.actors, status.autoscale
    if not spec.autoscale.enabled or chosen is None or actors.max_replicas is None or chosen.start != actors.replicas:
        return actors.replicas
    return min(max(chosen.actors, actors.min_replicas), actors.max_replicas)


def autoscale(draft: Draft, asked: Wanted) -> Wanted:
    """Looks at the balance once a period, and chooses. What the spec asks for, with as many actors as are chosen then."""
    spec = asked.job.spec
    if spec.autoscale.enabled:
        _look(draft, spec)
    elif draft.status.autoscale is not None:
        draft.set(autoscale=None)
    wanted = _with_actors(asked, num_actors(draft.status, spec))
    draft.seen = replace(draft.seen, wanted=wanted)
    return wanted


def _look(draft: Draft, spec: JobSpec) -> None:
    balance, before = draft.seen.balance, num_actors(draft.status, spec)
    if balance is None or balance.num_actors != before or _has_been_looked_at(balance, draft.status.autoscale):
        return
    chosen = choose(spec, before, balance)
    if chosen is None:
        return
    status = AutoscaleStatus(actors=chosen, start=spec.actors.replicas, step=balance.step, ratio=round(balance.ratio, 3))
    draft.set(autoscale=status)
    if chosen != before:
        draft.note(EventType.NORMAL, "Autoscaled", _why(spec, before, chosen, balance))


def choose(spec: JobSpec, before: int, balance: Balance) -> int | None:
    """Actors after a look at `balance`, made with `before` of them. None while the period lasts."""
    settings, actors = spec.autoscale, spec.actors
    gpus = actors.gpus_per_replica or 1
    most = actors.max_replicas or actors.replicas
    rule = ShareRule(
        ShareRuleSettings(
            num_gpus=most * gpus
            + 1,  # the trainers are a gang of a fixed size: they count as one GPU that the rule may not take
            least=actors.min_replicas * gpus,
            period_steps=settings.period_steps,
            low_ratio=settings.low_ratio,
            high_ratio=settings.high_ratio,
            take_away=math.ceil(settings.take_away_gpus / gpus) * gpus,
            add=math.ceil(settings.add_gpus / gpus) * gpus,
        )
    )
    share = rule.observe(Share(before * gpus, balance.begin_step), balance.step, balance.r, balance.r_gen)
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


def _has_been_looked_at(balance: Balance, last: AutoscaleStatus | None) -> bool:
    """Steps before the last look count only once the trainers have gone back to a checkpoint."""
    return last is not None and balance.begin_step < last.step <= balance.step


def _with_actors(wanted: Wanted, count: int) -> Wanted:
    if count == wanted.job.spec.actors.replicas:
        return wanted
    job = wanted.job.with_actors(count)
    return Wanted(job, replace(wanted.desired, pods=pods(job, wanted.desired.pods[0].context)))


def _why(spec: JobSpec, before: int, chosen: int, balance: Balance) -> str:
    settings = spec.autoscale
    bound = f"below lowRatio={settings.low_ratio}" if chosen < before else f"above highRatio={settings.high_ratio}"
    return (
        f"actors {before} -> {chosen}: in steps {balance.begin_step} to {balance.step} the trainers took {balance.r:.3g} of "
        f"the {balance.r_gen:.3g} groups per second that generation can make, a ratio of {balance.ratio:.3f}, {bound}; "
        f"without waiting they would take {balance.r_train:.3g}"
    )
