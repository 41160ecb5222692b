"""What the operator observes of one job, and what it decides. Plain data: no clock, no API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pipelinerl_control.balance import Balance
from pipelinerl_operator.controller.status import (
    MAX_MESSAGE_CHARACTERS,
    Condition,
    ConditionReason,
    ConditionType,
    JobPhase,
    JobStatus,
    StreamStatus,
    TrainingStatus,
    WeightGroupStatus,
    write_time,
)
from pipelinerl_operator.controller.views import JobView, OwnedView, PodView, is_of_job
from pipelinerl_operator.kube import Object, Resource
from pipelinerl_operator.objects import Desired, JobResource, PodSpec


@dataclass(frozen=True, slots=True)
class Wanted:
    """A valid spec and the objects that it asks for."""

    job: JobResource
    desired: Desired


@dataclass(frozen=True, slots=True)
class Child:
    """A child that is known by its metadata. `is_current`: it has not changed since the operator
    applied it.
    """

    resource: Resource
    view: OwnedView
    is_current: bool


class RuntimeReport(NamedTuple):
    """What a job's runtime in the leader knows about it. None: not known, or no runtime."""

    weight_group: WeightGroupStatus | None = None
    stream: StreamStatus | None = None
    training: TrainingStatus | None = None
    balance: Balance | None = None
    """Balance of generation and training since the last choice of the number of actors."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision depends on."""

    now: float
    """Seconds since the epoch."""
    job: JobView
    spec: Mapping[str, Any]
    """As the API server has it; so is `status`."""
    status: Mapping[str, Any]
    before: JobStatus
    """The same status, as far as this operator knows it."""
    wanted: Wanted | None
    """None for an invalid spec."""
    fault: str = ""
    """What is wrong with the spec, as a text for people."""
    pods: tuple[PodView, ...] = ()
    """Pods labelled with the job's name; some may belong to a predecessor of that name."""
    gone: Mapping[str, int] = field(default_factory=dict)
    """Attempts by name of pods that existed last time and that were removed by others since."""
    children: tuple[Child, ...] = ()
    has_secret: bool = False
    """Whether the Secret exists, and the streams on the server as this generation asks for."""
    stream_fault: str = ""
    """Why the job has no streams on the server yet."""
    refusal: str = ""
    """The API server's message when it refused a pod; the templates are the likely cause."""
    templates_checked: bool = False
    """Whether the API server has accepted the templates of this generation in a dry run."""
    namespace_is_going: bool = False
    weight_group: WeightGroupStatus | None = None
    stream: StreamStatus | None = None
    training: TrainingStatus | None = None
    balance: Balance | None = None

    @property
    def own_pods(self) -> tuple[PodView, ...]:
        """The pods of this job, without those of a predecessor of the same name."""
        return tuple(pod for pod in self.pods if is_of_job(pod, self.job.uid))


class EventType(StrEnum):
    """Types of Kubernetes events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Note:
    """An event for people. Example: Note(WARNING, "PodFailed", "sums-actor-0: Error")."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class CheckTemplates:
    """Creates these pods in a dry run; nothing is created before the server accepts them."""

    pods: tuple[PodSpec, ...]


@dataclass(frozen=True, slots=True)
class MakeSecret:
    """Creates the job's streams on the server, and its Secret with a new token and the login to
    them, unless they exist.
    """


@dataclass(frozen=True, slots=True)
class Apply:
    """Makes a child equal to `body`. `creates`: there is none yet, so that one of that name which
    appears is not the job's.
    """

    resource: Resource
    body: Object
    applied_hash: str
    creates: bool


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes the object with that UID. `grace_s` None uses the object's own grace period."""

    resource: Resource
    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Creates a pod of the plan as the given attempt."""

    pod: PodSpec
    attempt: int
    excluded_nodes: tuple[str, ...] = ()


Action = CheckTemplates | MakeSecret | Apply | Delete | CreatePod


@dataclass
class Decision:
    """The decision, built step by step. `status` is written first where it must be; then `actions`
    are executed in order, neighbours of one kind concurrently.
    """

    seen: Observed
    status: JobStatus
    actions: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    look_again_s: float | None = None
    """Seconds after which the decision may change without an event."""
    ignored: bool = False
    """The job is managed by another controller, or being deleted."""

    def note(self, type_: EventType, reason: str, message: str) -> None:
        self.notes.append(Note(type_, reason, message))

    def set(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)

    def set_condition(
        self, type_: ConditionType, holds: bool, reason: ConditionReason, message: str = ""
    ) -> None:
        """Sets a condition of the status. Its transition time moves only when `holds` changes."""
        old, since = self.status.condition(type_), write_time(self.seen.now)
        if old is not None and old.status == str(holds):
            since = old.last_transition_time
        new = Condition(
            type=type_.value,
            status="True" if holds else "False",
            reason=reason.value,
            message=message[:MAX_MESSAGE_CHARACTERS],
            last_transition_time=since,
            observed_generation=self.seen.job.generation,
        )
        by_type = {each.type: each for each in self.status.conditions} | {new.type: new}
        order = [each.value for each in ConditionType]
        known = [by_type.pop(name) for name in order if name in by_type]
        self.set(conditions=[*known, *by_type.values()])

    def end(
        self, phase: JobPhase, type_: ConditionType, reason: ConditionReason, message: str
    ) -> None:
        """Ends the job: `phase` is final, `type_` becomes true, and what described a running job
        becomes false.
        """
        self.set(phase=phase, completion_time=write_time(self.seen.now))
        self.set_condition(type_, True, reason, message)
        for other in (ConditionType.RUNNING, ConditionType.DEGRADED, ConditionType.EVALUATING):
            if self.status.holds(other):
                self.set_condition(other, False, ConditionReason.FINISHED)

    def fail(self, reason: ConditionReason, message: str) -> None:
        self.end(JobPhase.FAILED, ConditionType.FAILED, reason, message)
        self.note(EventType.WARNING, reason.value, message)

    def look_again(self, in_s: float) -> None:
        self.look_again_s = in_s if self.look_again_s is None else min(self.look_again_s, in_s)
