"""The lines that say what a run is waiting for: its phase, generators that do not answer,
steps that do not come, an evaluation's progress.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipelinerl_actor.evaluation.report import evaluated_steps
from pipelinerl_cli.up.live_metrics import GENERATING, RunView
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.runs.records import SILENCE_LIMIT_S, SILENCE_RECORD
from pipelinerl_common.settings import Job
from pipelinerl_common.text import counted, nouns
from pipelinerl_control.coordinator import Coordinator

LOOK_S = 1.0
FIRST_LOOK_S = 60.0
"""Waits shorter than this need no explanation."""
STEPS_WORTH = 4.0
"""Waits shorter than this many steps at the recent pace need none either."""
MAX_NAMED = 3
STEADY = ("every ready generator is a member", "an update is running")


class Status(NamedTuple):
    """What a run is doing."""

    phase: str
    detail: str = ""


def describe_phase(generators: Collection[str], coordinator: Coordinator, view: RunView) -> Status:
    """The phase once the processes have started. `generators` should be in the group."""
    trouble = "" if coordinator.waiting_for in STEADY else coordinator.waiting_for
    if silent := coordinator.silent:
        named = list(silent.items())[:MAX_NAMED]
        trouble = "; ".join(_unanswered(name, seconds) for name, seconds in named)
    if view.is_training:
        return Status("training", trouble)
    absent = [name for name in generators if name in coordinator.absent]
    if absent:
        ready = len(generators) - len(absent)
        waiting = trouble if silent else f"waiting for {', '.join(absent[:MAX_NAMED])}"
        return Status(f"loading: {ready} of {counted(len(generators), 'generator')} ready", waiting)
    if coordinator.group is None:
        return Status("forming the weight-transfer group", coordinator.waiting_for)
    if coordinator.served_version < 0:
        return Status("sending the first weights to the generators", trouble)
    generated = view.gauge("actor", "tokens_generated_total") or 0
    ready_groups = view.gauge("preprocessor", "queue_groups{stage=ready}") or 0
    progress = (
        f"{generated:,.0f} {nouns(generated, 'token')}, {counted(ready_groups, 'group')} ready"
    )
    return Status(GENERATING, progress)


@dataclass
class Silence:
    """Watches for generators that run but do not answer: reports them while that lasts, and ends
    them when it has lasted too long.

    `note` shows a line to the user, `record` keeps a value for `pipelinerl doctor`, `end` ends a
    process by its name.
    """

    note: Callable[[str], None]
    record: Callable[[str, float], None]
    end: Callable[[str], None]
    _next_s: dict[str, float] = field(default_factory=dict)
    """By generator: the length of its silence at which it is reported next; infinite once it was
    ended.
    """

    async def watch(self, silent: Callable[[], Mapping[str, float]]) -> None:
        """Looks once a second until cancelled."""
        while True:
            self.look(silent())
            await asyncio.sleep(LOOK_S)

    def look(self, silent: Mapping[str, float]) -> None:
        """`silent` has the seconds since the last answer by name. Each is reported at once, and
        whenever its silence has doubled.
        """
        for name in [name for name in self._next_s if name not in silent]:
            if self._next_s.pop(name) < math.inf:
                self.note(f"{name} answers again, or has ended")
            self.record(SILENCE_RECORD.format(name=name), 0.0)
        for name, seconds in silent.items():
            if seconds < self._next_s.get(name, 0.0):
                continue
            if seconds >= SILENCE_LIMIT_S:
                self._next_s[name] = math.inf
                self.note(f"{name} has not answered for {seconds:.0f} s: it is ended and restarted")
                self.end(name)
            else:
                self._next_s[name] = min(2 * seconds, SILENCE_LIMIT_S)
                self.record(SILENCE_RECORD.format(name=name), seconds)
                self.note(_unanswered(name, seconds))


def _unanswered(name: str, seconds: float) -> str:
    return (
        f"{name} has not answered for {seconds:.0f} s; after {SILENCE_LIMIT_S:.0f} s it is ended "
        "and restarted"
    )


@dataclass
class StallExplainer:
    """Explains why no step comes: what is missing, and what became of the groups meanwhile. It
    speaks each time the wait since the last step has doubled.
    """

    groups_per_step: int
    _since: float | None = None
    _step: int = -1
    _next_s: float = FIRST_LOOK_S
    _before: dict[tuple[str, str], float] = field(default_factory=dict)
    """The counters when the wait began, by role and name."""

    def look(self, view: RunView, now: float) -> str | None:
        """`now` in seconds on any clock. The wait begins when the generators serve: before that the
        phases say what happens.
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
            view.gauge("preprocessor", f"queue_groups{{stage={stage}}}") or 0
            for stage in ("ready", "running")
        )
        parts = [
            f"no step for {waited:.0f} s: step {view.step + 1} needs "
            f"{counted(self.groups_per_step, 'group')}, "
            f"{ready:.0f} {nouns(ready, 'is', 'are')} ready, "
            f"{running:.0f} {nouns(running, 'runs', 'run')}"
        ]
        if dropped := self._counted(view, "preprocessor", "groups_dropped_total{reason=", "}"):
            parts.append(f"groups dropped meanwhile: {dropped}")
        if failed := self._counted(view, "actor", "rollout_errors_total{reason=", "}"):
            parts.append(f"rollouts failed meanwhile: {failed}; see logs/actor-0.log")
        parts += [
            f"{name} has reported nothing for {seconds:.0f} s"
            for name, seconds in view.quiet.items()
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


def is_evaluated(job: Job, root: Path) -> bool:
    """Whether the finished run in `root` needs no further evaluation."""
    last = max(evaluated_steps(root), default=-1)
    return job.spec.evaluation is None or last >= job.spec.algorithm.steps


def evaluation_progress(view: RunView, sets: Sequence[str]) -> str:
    """The running evaluation's progress. Example: "set held-out 34/128"."""
    running = view.gauge(EVALUATOR, "evaluation_running_step")
    if running is None or running < 0:
        return "waiting for the evaluator"
    for name in sets:
        done = view.gauge(EVALUATOR, f"evaluation_prompts_done{{set={name}}}") or 0
        planned = view.gauge(EVALUATOR, f"evaluation_prompts_planned{{set={name}}}") or 0
        if done < planned:
            return f"set {name} {done:.0f}/{planned:.0f}"
    return "writing the result"
