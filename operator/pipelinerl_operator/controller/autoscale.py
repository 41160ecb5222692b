"""`autoscale` in the life of a job.

```
 spec.actors.replicas   where it begins, and begins again whenever somebody changes it
 status.autoscale       what was chosen since; written before it is acted on
```
"""

from dataclasses import replace

from pipelinerl_control.scaling import look, num_actors
from pipelinerl_operator.controller.decision import Draft, EventType, Wanted
from pipelinerl_operator.objects.pods import pods


def take_choice(draft: Draft) -> None:
    """From here on the job has as many actors as were chosen."""
    wanted = draft.seen.wanted
    if wanted is not None:
        count = num_actors(wanted.job.spec, draft.status.autoscale)
        draft.seen = replace(draft.seen, wanted=_with_actors(wanted, count))


def autoscale(draft: Draft, asked: Wanted) -> Wanted:
    """Looks at the balance once a period, and chooses. What the spec asks for, with as many actors
    as are chosen then.
    """
    spec = asked.job.spec
    if spec.autoscale.enabled:
        training = draft.seen.training or draft.status.training
        looked = look(
            spec, draft.status.autoscale, training.step if training else None, draft.seen.balance
        )
        if looked is not None:
            draft.set(autoscale=looked.choice)
            if looked.why:
                draft.note(EventType.NORMAL, "Autoscaled", looked.why)
    elif draft.status.autoscale is not None:
        draft.set(autoscale=None)
    wanted = _with_actors(asked, num_actors(spec, draft.status.autoscale))
    draft.seen = replace(draft.seen, wanted=wanted)
    return wanted


def _with_actors(wanted: Wanted, count: int) -> Wanted:
    if count == wanted.job.spec.actors.replicas:
        return wanted
    job = wanted.job.with_actors(count)
    return Wanted(job, replace(wanted.desired, pods=pods(job, wanted.desired.pods[0].context)))
