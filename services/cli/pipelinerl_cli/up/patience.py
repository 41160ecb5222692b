"""When no step comes for long: what the run waits for, and what became of the groups meanwhile."""

from dataclasses import dataclass, field

from pipelinerl_cli.up.view import RunView
from pipelinerl_common.words import counted, nouns

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
