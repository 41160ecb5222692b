"""Generators that have stopped answering though they run: said while it lasts, and ended when it
has lasted too long.

That the trainer went back to a checkpoint, as the preprocessor tells it at once.

When no step comes for long: what the run waits for, and what became of the groups meanwhile.

What the run is waiting for until its first step, in words.

The evaluator beside a run: how far it is.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl_actor.evaluation.report import evaluated_steps
from pipelinerl_cli.runs.records import SILENCE_LIMIT_S, SILENCE_RECORD
from pipelinerl_cli.up.live_metrics import GENERATING, RunView
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.settings import Job
from pipelinerl_common.text import counted, nouns
from pipelinerl_control.coordinator import Coordinator

LOOK_S = 1.0


@dataclass
class Silence:
    """`note` says something to the user, `record` keeps a value for `pipelinerl doctor`, `end` ends
    a process by its name.
    """

    note: Callable[[str], None]
    record: Callable[[str, float], None]
    end: Callable[[str], None]
    _next_s: dict[str, float] = field(default_factory=dict)
    """Of each silent one: how long it is silent when it is spoken of again; infinite once it was
    ended.
    """

    async def watch(self, silent: Callable[[], Mapping[str, float]]) -> None:
        """Looks once a second until cancelled."""
        while True:
            self.look(silent())
            await asyncio.sleep(LOOK_S)

    def look(self, silent: Mapping[str, float]) -> None:
        """`silent` has the seconds since the last answer by name. Speaks at once, and each time the
        silence has doubled.
        """
        for name in [name for name in self._next_s if name not in silent]:
            if self._next_s[name] < math.inf:
                self.note(f"{name} answers again, or has ended")
            self._forget(name)
        for name, seconds in silent.items():
            if seconds < self._next_s.get(name, 0.0):
                continue
            if seconds >= SILENCE_LIMIT_S:
                self._next_s[name] = math.inf
                self.note(
                    f"{name} has not answered for {seconds:.0f} s: it is ended and started again"
                )
                self.end(name)
            else:
                self._next_s[name] = min(2 * seconds, SILENCE_LIMIT_S)
                self.record(SILENCE_RECORD.format(name=name), seconds)
                self.note(explained(name, seconds))

    def _forget(self, name: str) -> None:
        del self._next_s[name]
        self.record(SILENCE_RECORD.format(name=name), 0.0)


def explained(name: str, seconds: float) -> str:
    """What is so, and what will happen."""
    return (
        f"{name} has not answered for {seconds:.0f} s; after {SILENCE_LIMIT_S:.0f} s it is ended and "
        "started again"
    )


FIRST_LOOK_S = 60.0
"""Waits shorter than this need no explanation."""
STEPS_WORTH = 4.0
"""Nor do those shorter than this many steps at the pace of the last ones."""


@dataclass
class Patience:
    """Looked at often; says something each time the wait since the last step has doubled."""

    groups_per_step: int
    _since: float | None = None
    _step: int = -1
    _next_s: float = FIRST_LOOK_S
    _before: dict[tuple[str, str], float] = field(default_factory=dict)
    """The counters when the wait began, by role and name."""

    def look(self, view: RunView, now: float) -> str | None:
        """`now` in seconds on any clock. Waits count while generators serve: before, the phases say
        what is going on.
        """
        if self._since is None or view.step != self._step or not view.is_generating:
            self._since, self._step, self._before = now, view.step, dict(view.counters)
            self._next_s = max(FIRST_LOOK_S, STEPS_WORTH * (view.seconds_per_step or 0.0))
            return None
        waited = now - self._since
        if waited < self._next_s:
            return None
        self._next_s = 2 * waited
        return self._explain(view, waited)

    def _explain(self, view: RunView, waited: float) -> str:
        ready, running = (
            view.gauge("preprocessor", name) or 0
            for name in ("queue_groups{stage=ready}", "queue_groups{stage=running}")
        )
        parts = [
            f"no step for {waited:.0f} s: step {view.step + 1} needs "
            f"{counted(self.groups_per_step, 'group')}, "
            f"{ready:.0f} {nouns(ready, 'is', 'are')} ready, {running:.0f} "
            f"{nouns(running, 'runs', 'run')}"
        ]
        dropped = self._counted(view, "preprocessor", "groups_dropped_total{reason=", "}")
        failed = self._counted(view, "actor", "rollout_errors_total{reason=", "}")
        if dropped:
            parts.append(f"groups dropped meanwhile: {dropped}")
        if failed:
            parts.append(f"rollouts failed meanwhile: {failed}; see logs/actor-0.log")
        parts += [
            f"{name} has told nothing for {seconds:.0f} s" for name, seconds in view.quiet.items()
        ]
        if view.is_training and view.detail:
            parts.append(view.detail)
        return "; ".join(parts)

    def _counted(self, view: RunView, role: str, prefix: str, suffix: str) -> str:
        """Example: "zero_advantage 640, expired 2", the most frequent first."""
        counts = {
            name[len(prefix) : -len(suffix)]: count - self._before.get((of, name), 0.0)
            for (of, name), count in view.counters.items()
            if of == role and name.startswith(prefix) and name.endswith(suffix)
        }
        most = sorted((item for item in counts.items() if item[1] > 0), key=lambda item: -item[1])
        return ", ".join(f"{reason} {count:,.0f}" for reason, count in most)


MOST_NAMED = 3
STEADY = ("every ready generator is a member", "an update is running")


def describe_phase(
    generators: Collection[str], coordinator: Coordinator, view: RunView
) -> tuple[str, str]:
    """The phase and a detail. `generators` are those that should be in the group."""
    trouble = "" if coordinator.waiting_for in STEADY else coordinator.waiting_for
    if silent := coordinator.silent:
        trouble = "; ".join(
            explained(name, seconds) for name, seconds in list(silent.items())[:MOST_NAMED]
        )
    if view.is_training:
        return "training", trouble
    absent = [name for name in generators if name in coordinator.absent]
    if absent:
        ready = len(generators) - len(absent)
        waiting = trouble if silent else f"waiting for {', '.join(absent[:MOST_NAMED])}"
        return f"loading: {ready} of {counted(len(generators), 'generator')} ready", waiting
    if coordinator.group is None:
        return "forming the weight-transfer group", coordinator.waiting_for
    if coordinator.served_version < 0:
        return "sending the first weights to the generators", trouble
    generated = view.gauge("actor", "tokens_generated_total") or 0
    ready_groups = view.gauge("preprocessor", "queue_groups{stage=ready}") or 0
    return (
        GENERATING,
        f"{generated:,.0f} {nouns(generated, 'token')}, {counted(ready_groups, 'group')} ready",
    )


def is_evaluated(job: Job, root: Path) -> bool:
    """Whether nothing of the finished run in `root` is left to be evaluated."""
    return (
        job.spec.evaluation is None
        or max(evaluated_steps(root), default=-1) >= job.spec.algorithm.steps
    )


def progress(view: RunView, sets: Sequence[str]) -> str:
    """Of the running evaluation. Example: "set held-out 34/128"; what is waited for when none runs."""
    running = view.gauge(EVALUATOR, "evaluation_running_step")
    if running is None or running < 0:
        return "waiting for the evaluator"
    for name in sets:
        done = view.gauge(EVALUATOR, f"evaluation_prompts_done{{set={name}}}") or 0
        planned = view.gauge(EVALUATOR, f"evaluation_prompts_planned{{set={name}}}") or 0
        if done < planned:
            return f"set {name} {done:.0f}/{planned:.0f}"
    return "writing the result"
