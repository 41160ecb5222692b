"""SLACK: a strict age bound without drops, with as little waiting as any such rule can have.

Every group has a deadline d = birth + eta, the last step that may train it. The rule keeps one
inequality. Let k be the step in assembly, r its slots still empty, N(d) the outstanding groups with
deadline d or earlier and I(d) those of them that still run. Steps k .. d have (d - k) B + r slots
left, so

    H:  N(d) <= (d - k) B + r   for every d >= k

says exactly that every group can still meet its deadline (Hall's condition for unit jobs).

Why it is safe. Admission keeps H: a new group has the latest deadline of all, so only the total can
break. A whole batch is taken only if I(d) <= (d - k) B for every d, and then consists of the r
ready groups of earliest deadline. Look at one d. If r ready groups had a deadline of at most d,
N(d) falls by r and H becomes N(d) <= (d - k) B. Otherwise all of them are in the batch and N(d) =
I(d), which the test bounds by the same number. Either way H holds for step k + 1 with B fresh
slots, and d = k says that nothing whose time has come is left. A single group g is taken only if
one slot less still suffices for the running groups due before g; no ready group is due before g,
and from d(g) on both sides fall by one. Tokens sampled later in a group are younger than its birth,
so weight updates during generation need nothing extra.

Why it never locks up. Nothing is cancelled, so running groups finish; once none runs, I = 0 and
every test passes as soon as r groups are ready, and admission allows a whole batch whenever the
served version has caught up.

Why nothing strict can start a step sooner. The test looks at running groups only. A rule that
starts step k while I(d) > (d - k) B for some d leaves more groups due by d than the steps up to d
can train, so it must drop one or break the bound. This holds for the same births and finishing
times; engines that slow down under load are outside of it.

Admission up to (eta + 1) B would make H tight everywhere and leave one possible batch, the oldest
version's. What buys throughput is slack in H: fewer groups outstanding than the bound allows
(`c_busy`, `c_idle`), and training each group as it comes, because a step needs its last straggler
only for its last slot.
"""

from dataclasses import dataclass

from pipelinerl_staleness.checks import flag, optional_whole, whole
from pipelinerl_staleness.groups import GroupPolicy
from pipelinerl_staleness.policy import EngineLoad, PolicySettings, Take

_LOW_KV_USAGE = 0.2


@dataclass(frozen=True, slots=True)
class SlackSettings(PolicySettings):
    """Parameters of `slack`."""

    eta: int = whole(3, at_least=0)
    """Oldest age of a trained token in versions, at least 0; 0 is synchronous."""
    c_busy: int | None = optional_whole(at_least=1)
    """Groups outstanding at most while the trainer computes; unset is one and a half batches."""
    c_idle: int | None = optional_whole(at_least=1)
    """Groups outstanding at most while the trainer waits, at least B; unset is one and a half
    batches.
    """
    stream: bool = flag(True)
    """Whether groups are trained one by one as they come, where the trainer can do that."""
    adaptive: bool = flag(True)
    """Whether the knobs move with the load reports, between the values above and eta + 1 batches:
    the one in force up while the KV cache is nearly empty, both down after a preemption or a wait
    for a group at its deadline.
    """


class Slack(GroupPolicy):
    """Admits under H and the slack knob; takes by earliest deadline when the running groups leave
    room. Strict: eta.

    The birth of a group is the version of its first token, reported at any time before its
    `finished`; until then it is the version served at admission, which is never newer.
    """

    settings_type = SlackSettings
    settings: SlackSettings
    keeps_kv = True

    def __init__(self, settings: SlackSettings, groups_per_step: int) -> None:
        super().__init__(settings, groups_per_step)
        default = groups_per_step * 3 // 2
        self.c_busy = default if settings.c_busy is None else settings.c_busy
        self.c_idle = default if settings.c_idle is None else settings.c_idle
        if self.c_idle < groups_per_step:
            raise ValueError(
                f"c_idle={self.c_idle} must be at least the {groups_per_step} groups of a step"
            )
        self._start = self.c_busy, self.c_idle
        self._busy = False
        self._waited_for_deadline = False
        self._born: set[str] = set()

    @property
    def streams(self) -> bool:
        return self.settings.stream

    def may_admit(self) -> bool:
        knob = self.c_busy if self._busy else self.c_idle
        return len(self.groups) < min(knob, self._slots_until(self.version + self.settings.eta))

    def started(self, group: str, version: int) -> None:
        super().started(group, version)
        self._born.discard(group)

    def first_token(self, group: str, version: int) -> None:
        if group in self._born:
            self.groups.lower_stamp(group, version)
        elif group in self.groups:
            self._born.add(group)
            self.groups.restamp(group, version)

    def lost(self, group: str) -> None:
        super().lost(group)
        self._born.discard(group)

    def take(self, step: int) -> Take:
        needed = self._slots_until(self._step())
        if len(self.groups.ready) < needed:
            return self._idle(f"{len(self.groups.ready)} of {needed} groups ready")
        if not self._leaves_room(needed, before=None):
            return self._idle_at_deadline(step)
        return self._train(self.groups.ready_by_stamp()[:needed])

    def take_next(self, step: int) -> Take:
        if not self.groups.ready:
            return self._idle("no group ready")
        ready = self.groups.ready
        group = min(ready, key=lambda name: (ready[name], self.groups.dispatch_order(name)))
        if not self._leaves_room(1, before=ready[group]):
            return self._idle_at_deadline(step)
        return self._train([group])

    def step_begun(self, step: int) -> None:
        self._busy = True

    def step_done(self, step: int) -> None:
        self._busy = False

    def observe(self, load: EngineLoad) -> tuple[str, ...]:
        """Engines that are nearly empty cannot be crowded by more groups, so they outweigh a wait
        for a deadline.
        """
        crowded = load.num_waiting > 0 or load.num_preemptions > 0
        if not self.settings.adaptive:
            return ()
        if load.kv_usage is not None and load.kv_usage < _LOW_KV_USAGE and not crowded:
            self._move_knobs(*((1, 0) if self._busy else (0, 1)))
        elif crowded or self._waited_for_deadline:
            self._move_knobs(-1, -1)
        self._waited_for_deadline = False
        return ()

    def recover(self, step: int, version: int) -> None:
        super().recover(step, version)
        self._born.clear()
        self._busy = False
        self.c_busy, self.c_idle = self._start

    def bound(self) -> int:
        return self.settings.eta

    def max_outstanding(self) -> int:
        return (self.settings.eta + 1) * self.groups_per_step

    def min_waiting(self) -> int:
        return self.max_outstanding()

    def _move_knobs(self, busy: int, idle: int) -> None:
        batch = self.groups_per_step
        change = max(1, batch // 8)
        most = (self.settings.eta + 1) * batch
        least_busy, least_idle = self._start
        self.c_busy = max(least_busy, min(self.c_busy + busy * change, most))
        self.c_idle = max(least_idle, min(self.c_idle + idle * change, most))

    def _step(self) -> int:
        return self.num_taken // self.groups_per_step

    def _slots_until(self, deadline: int) -> int:
        """(d - k) B + r: slots of the step in assembly and of all later steps up to `deadline`."""
        return (deadline + 1) * self.groups_per_step - self.num_taken

    def _leaves_room(self, num_taken: int, before: int | None) -> bool:
        """Whether the running groups born before `before` (all, if None) still fit after
        `num_taken` slots are used.
        """
        due = 0
        for birth, number in sorted(self.groups.num_running_by_stamp.items()):
            if before is not None and birth >= before:
                break
            due += number
            if due > self._slots_until(birth + self.settings.eta) - num_taken:
                return False
        return True

    def _train(self, chosen: list[str]) -> Take:
        for group in chosen:
            self.groups.remove(group)
            self._born.discard(group)
        self.num_taken += len(chosen)
        self._busy = True
        return Take(groups=tuple(chosen))

    def _idle(self, why: str) -> Take:
        self._busy = False
        return self.wait(why)

    def _idle_at_deadline(self, step: int) -> Take:
        self._waited_for_deadline = True
        return self._idle(f"running groups must be trained by step {step} or soon after")
