"""What the operator sees of one job, and what it decides to do about it. Plain data: no clock, no
API.

Conditions of a job, with their reasons from closed lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
from pipelinerl_operator.controller.views import JobView, OwnedView, PodView
from pipelinerl_operator.kube import Object, Resource
from pipelinerl_operator.objects import Desired, JobResource, PodSpec


@dataclass(frozen=True, slots=True)
class Wanted:
    """A valid spec and what follows from it."""

    job: JobResource
    desired: Desired


@dataclass(frozen=True, slots=True)
class Child:
    """A child known by its metadata. `is_current` when it is what the operator applied last and
    nobody has changed it since.
    """

    resource: Resource
    view: OwnedView
    is_current: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision rests on."""

    now: float
    """Seconds since the epoch."""
    job: JobView
    spec: Mapping[str, Any]
    """As it lies in the API server, as is `status`."""
    status: Mapping[str, Any]
    before: JobStatus
    """The same status, as far as this operator knows it."""
    wanted: Wanted | None
    """None for an invalid spec."""
    fault: str = ""
    """What is wrong with the spec, for people."""
    pods: tuple[PodView, ...] = ()
    """Of the job's name; some may belong to a predecessor."""
    gone: Mapping[str, int] = field(default_factory=dict)
    """Attempts by name of pods that were there at the last look and that somebody else has removed
    since.
    """
    children: tuple[Child, ...] = ()
    has_secret: bool = False
    """Whether it has its Secret, and its place on the stream's server as this generation asks for.
    """
    stream_fault: str = ""
    """Why the job has no place on the stream's server yet."""
    refusal: str = ""
    """What the API server said when it refused a pod; the templates are the likely reason."""
    templates_checked: bool = False
    """Whether the API server has accepted the templates of this generation in a dry run."""
    namespace_is_going: bool = False
    weight_group: WeightGroupStatus | None = None
    """None while no coordinator runs for the job."""
    stream: StreamStatus | None = None
    training: TrainingStatus | None = None
    balance: Balance | None = None
    """Of generation and training since the last look at it."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Note:
    """An event for people. Example: Note(WARNING, "PodFailed", "sums-actor-0: Error, exit code 1:
    ...").
    """

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class CheckTemplates:
    """Creates these pods in a dry run; nothing else is created before the API server has accepted
    them.
    """

    pods: tuple[PodSpec, ...]


@dataclass(frozen=True, slots=True)
class MakeSecret:
    """Makes the job's place on the stream's server, and its Secret with a new token and that
    place's login, unless there is one.
    """


@dataclass(frozen=True, slots=True)
class Apply:
    """Makes a child what `body` says. `creates` when there is none yet: one of that name that
    appears is not the job's.
    """

    resource: Resource
    body: Object
    applied_hash: str
    creates: bool


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes that very object. `grace_s` None takes the object's own."""

    resource: Resource
    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class CreatePod:
    pod: PodSpec
    attempt: int
    excluded_nodes: tuple[str, ...] = ()


Action = CheckTemplates | MakeSecret | Apply | Delete | CreatePod


@dataclass(frozen=True, slots=True)
class Decision:
    """`status` is written first, where it must be; then `actions` are done in order, those of one
    kind together.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    look_again_s: float | None = None
    """Seconds after which time alone may change the decision."""
    ignored: bool = False
    """The job is somebody else's, or on its way out."""


@dataclass
class Draft:
    """A decision in the making. `status` is replaced step by step."""

    seen: Observed
    status: JobStatus
    actions: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    look_again_s: float | None = None

    def note(self, type_: EventType, reason: str, message: str) -> None:
        self.notes.append(Note(type_, reason, message))

    def set(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)

    def set_condition(
        self, type_: ConditionType, holds: bool, reason: ConditionReason, message: str = ""
    ) -> None:
        """Sets a condition of the status. Its transition time moves only when `holds` changes."""
        old, status = self.status.condition(type_), "True" if holds else "False"
        is_same = old is not None and old.status == status
        new = Condition(
            type=type_.value,
            status="True" if holds else "False",
            reason=reason.value,
            message=message[:MAX_MESSAGE_CHARACTERS],
            last_transition_time=old.last_transition_time
            if old is not None and is_same
            else write_time(self.seen.now),
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

    def done(self) -> Decision:
        return Decision(self.status, tuple(self.actions), tuple(self.notes), self.look_again_s)
