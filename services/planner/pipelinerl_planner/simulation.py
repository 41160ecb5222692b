"""One run of asynchronous training in virtual time, driven by a real policy object.

    lengths -> admission -> engines -> finished groups -> take -> trainer -> publish -> engines
               (policy)                                  (policy)    |
                  ^                                                  |
                  +--------------- slots become free ----------------+

Everything happens at events: a sequence ends, blocks run out, a step (or, streaming, a group) is
trained, weights arrive, a load report is due. After each event the policy is asked whether more
groups may start, whether finished weights may be published and, if the trainer is free, for the
next batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.generators import NEVER, SimulatedGenerators, SimulatedSequence
from pipelinerl_planner.lengths import Lengths
from pipelinerl_planner.outcome import SimulationOutcome, count, count_length
from pipelinerl_staleness.policy import EngineLoad, Policy

_REPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """The simulated run apart from its policy."""

    cluster: SimulatedCluster
    lengths: Lengths
    num_steps: int
    train_seconds: tuple[float, ...] = ()
    """Seconds of each step from its whole batch to its end, in place of the cluster's costs;
    repeated after the last.
    """
    publish_seconds: tuple[float, ...] = ()
    """Seconds of each publish, in place of the cluster's; repeated after the last."""


def simulate(
    policy: Policy, run: SimulationRun, progress: Callable[[int], None] | None = None
) -> SimulationOutcome:
    """Trains `run.num_steps` steps, or until the data ends, and calls `progress` with the number of
    finished steps.

    Raises RuntimeError when nothing can happen although the data has not ended: the policy is
    stuck.
    """
    return _Simulation(policy, run, progress).go()


class _Simulation:
    def __init__(
        self, policy: Policy, run: SimulationRun, progress: Callable[[int], None] | None
    ) -> None:
        self.policy = policy
        self.run = run
        self.progress = progress
        self.outcome = SimulationOutcome()
        self.now = 0.0
        self.generators = SimulatedGenerators(run.cluster)
        self.groups: dict[str, list[SimulatedSequence]] = {}
        self.num_unfinished: dict[str, int] = {}
        self.num_drawn = 0
        self.data_ended = False
        self.step = 0
        self.num_slots_trained = 0
        self.version = 0
        self.version_due = self.version_on_its_way = 0
        self.trainer_free_at: float | None = None
        self.pause_at: float | None = None
        self.publish_ends_at: float | None = None
        self.answers: list[tuple[float, int, SimulatedSequence]] = []
        """Finished sequences by the time at which the actor receives them."""
        self.num_answers = 0
        self.arriving: list[tuple[float, str]] = []
        """Groups whose last token is sampled, by the time at which they are ready."""
        self.num_leased = 0
        """Admitted trajectories that are not sampled to their end."""
        self.idle_since = 0.0
        self.batch_staleness = 0
        self.may_take = False
        reports = type(policy).observe is not Policy.observe
        self.next_report = _REPORT_S if reports else NEVER
        self.num_preemptions_reported = 0

    def go(self) -> SimulationOutcome:
        self._ask_policy()
        while self.step < self.run.num_steps:
            ways = (heap[0][0] if heap else None for heap in (self.answers, self.arriving))
            upcoming = (
                self.generators.next_event(),
                self.trainer_free_at,
                self.pause_at,
                self.publish_ends_at,
                *ways,
            )
            next_at = min(at for at in upcoming if at is not None)
            if next_at == NEVER:
                if self.data_ended:
                    break
                raise RuntimeError(
                    f"step {self.step} can never start: {self.policy.take(self.step).wait_reason}"
                )
            self._wait_until(min(next_at, self.next_report))
            self._handle()
            self._ask_policy()
        outcome = self.outcome
        outcome.wall_seconds, outcome.num_steps = self.now, self.step
        outcome.num_preemptions, outcome.num_refilled_tokens = self.generators.effort()
        outcome.running_seconds, outcome.kv_usage_seconds = self.generators.integrals(self.now)
        return outcome

    def _wait_until(self, at: float) -> None:
        self.now = max(self.now, at)

    def _handle(self) -> None:
        if self.trainer_free_at is not None and self.trainer_free_at <= self.now:
            self._trained()
        elif self.pause_at is not None and self.pause_at <= self.now:
            self.pause_at = None
            self.generators.pause(self.now)
        elif self.arriving and self.arriving[0][0] <= self.now:
            self._ready(heappop(self.arriving)[1])
        elif self.answers and self.answers[0][0] <= self.now:
            self._answered(heappop(self.answers)[2])
        elif self.publish_ends_at is not None and self.publish_ends_at <= self.now:
            self._published()
        elif self.next_report <= self.now:
            self._report()
        else:
            for sequence in self.generators.handle_event(self.now):
                self._label(sequence)
                self.num_answers += 1
                heappush(
                    self.answers,
                    (self.now + self.run.cluster.request_s / 2, self.num_answers, sequence),
                )

    def _ask_policy(self) -> None:
        most = self.run.cluster.max_leased
        while (
            not self.data_ended
            and (most is None or self.num_leased < most)
            and self.policy.may_admit()
        ):
            self._admit()
        self.generators.limit = self.policy.trajectory_limit()
        self.generators.start(self.now)
        if self.run.cluster.pause_s is not None:
            self._publish_beside_training(self.run.cluster.pause_s)
            return
        if self.trainer_free_at is not None or self.publish_ends_at is not None:
            return
        if self.version_due > self.version and self.step < self.run.num_steps:
            if self.policy.may_publish():
                self.generators.pause(self.now)
                self._begin_publish()
        elif self.may_take:
            self._take()

    def _publish_beside_training(self, pause_s: float) -> None:
        """Publishes without pausing training. The next batch is not taken while the policy holds
        the newest weights back.
        """
        is_due = self.version_due > self.version and self.step < self.run.num_steps
        if is_due and self.publish_ends_at is None and self.policy.may_publish():
            self._begin_publish()
            self.pause_at = max(self.now, (self.publish_ends_at or self.now) - pause_s)
        held_back = is_due and self.publish_ends_at is None
        if self.trainer_free_at is None and self.may_take and not held_back:
            self._take()

    def _begin_publish(self) -> None:
        self.version_on_its_way = self.version_due
        recorded = self.run.publish_seconds
        self.publish_ends_at = self.now + (
            recorded[(self.version_due - 1) % len(recorded)]
            if recorded
            else self.run.cluster.publish_s
        )

    def _admit(self) -> None:
        try:
            prompt, lengths = self.run.lengths.group(self.num_drawn)
        except IndexError:
            self.data_ended = True
            return
        group = str(self.num_drawn)
        self.num_drawn += 1
        self.groups[group] = [SimulatedSequence(group, prompt, length) for length in lengths]
        self.num_unfinished[group] = len(lengths)
        self.num_leased += len(lengths)
        self.policy.admitted(group)
        self.policy.started(group, self.version)
        self.generators.queue.extend(self.groups[group])

    def _answered(self, sequence: SimulatedSequence) -> None:
        self.generators.release(sequence)
        if sequence.cancelled:
            return
        group = sequence.group
        self.policy.last_token(group, sequence.segments[-1][0])
        self.policy.trajectory_finished(group)
        self.num_unfinished[group] -= 1
        self.num_leased -= 1
        if self.num_unfinished[group] == 0:
            heappush(self.arriving, (self.now + self.run.cluster.finish_s, group))

    def _ready(self, group: str) -> None:
        if self.num_unfinished.pop(group, None) is not None:  # not cancelled on the way
            self.policy.finished(group)
            self.may_take = True

    def _label(self, sequence: SimulatedSequence) -> None:
        """Labels all tokens generated since the last publish with the version served now."""
        new = self.generators.generated(sequence) - sum(tokens for _, tokens in sequence.segments)
        if new <= 0:
            return
        if not sequence.segments:
            self.policy.first_token(sequence.group, self.version)
        sequence.segments.append((self.version, new))

    def _take(self) -> None:
        streams = self.policy.streams
        taken = self.policy.take_next(self.step) if streams else self.policy.take(self.step)
        for group in taken.dropped:
            self.outcome.dropped_tokens_l3 += self._discard(group)
        self.may_take = False
        if not taken.groups:
            return
        self.outcome.trainer_idle_seconds += self.now - self.idle_since
        tokens = 0
        for group in taken.groups:
            tokens += self._count_trained(group)
        if self.num_slots_trained == 0:
            self.policy.step_begun(self.step)
        self.num_slots_trained += len(taken.groups)
        is_last = self.num_slots_trained == self.policy.groups_per_step
        cluster = self.run.cluster
        recorded = self.run.train_seconds
        seconds = tokens / cluster.train_tokens_per_s + (cluster.train_step_s if is_last else 0.0)
        if recorded and not streams:
            seconds = recorded[self.step % len(recorded)]
        self.trainer_free_at = self.now + seconds

    def _count_trained(self, group: str) -> int:
        tokens = 0
        outcome = self.outcome
        for sequence in self.groups.pop(group):
            tokens += sequence.length
            for version, number in sequence.segments:
                count(outcome.tokens_by_staleness, self.step - version, number)
            oldest = self.step - sequence.segments[0][0]
            count(outcome.trajectories_by_staleness, oldest)
            count_length(outcome.trained_lengths, sequence.length)
            self.batch_staleness = max(self.batch_staleness, oldest)
        outcome.trained_tokens += tokens
        return tokens

    def _trained(self) -> None:
        """Handles the end of a step or, streaming, of a group; or of the gap after a step."""
        self.trainer_free_at = None
        self.idle_since = self.now
        self.may_take = True
        if self.num_slots_trained < self.policy.groups_per_step:
            return
        if self.run.cluster.train_gap_s:
            self.trainer_free_at = self.now + self.run.cluster.train_gap_s
        self.num_slots_trained = 0
        count(self.outcome.batches_by_max_staleness, self.batch_staleness)
        self.batch_staleness = 0
        self.policy.step_done(self.step)
        if self.policy.publishes_after(self.step):
            self.version_due = self.step + 1
        self.step += 1
        if self.progress is not None:
            self.progress(self.step)

    def _published(self) -> None:
        self.publish_ends_at = None
        for sequence in self.generators.in_flight():
            self._label(sequence)
        self.version = self.version_on_its_way
        self._cancel(self.policy.published(self.version))
        keeps_kv = self.run.cluster.keeps_kv
        self.generators.resume(self.now, self.policy.keeps_kv if keeps_kv is None else keeps_kv)
        self.idle_since = self.now
        self.may_take = True

    def _report(self) -> None:
        self.next_report += _REPORT_S
        preemptions, _ = self.generators.effort()
        usage, waiting = self.generators.load(self.now)
        load = EngineLoad(usage, waiting, preemptions - self.num_preemptions_reported, _REPORT_S)
        self.num_preemptions_reported = preemptions
        self._cancel(self.policy.observe(load))

    def _cancel(self, groups: tuple[str, ...]) -> None:
        self.generators.cancel(
            [sequence for group in groups for sequence in self.groups[group]], self.now
        )
        for group in groups:
            self.num_leased -= self.num_unfinished.pop(group)
            self.outcome.dropped_tokens_l2 += self._discard(group)

    def _discard(self, group: str) -> int:
        """Counts a dropped group's lengths and returns the tokens that were generated for it."""
        sequences = self.groups.pop(group)
        for sequence in sequences:
            count_length(self.outcome.dropped_lengths, sequence.length)
        return sum(sequence.num_generated for sequence in sequences)
