"""`status` of a PipelineRLJob: what people read, and what the operator must remember across
restarts.

Everything is derived from observations, except what is marked as remembered: those facts are
written before the operator acts on them, so that a crash between any two writes loses and repeats
nothing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl_common.settings.base import Settings
from pipelinerl_control.readings import Reading, parse_metrics
from pipelinerl_control.scaling import ScalingChoice

MAX_FAILURES = 128
"""Failures remembered; older ones are forgotten first."""
MAX_MEMBERS = 256
MAX_MESSAGE_CHARACTERS = 1024

Text = Annotated[str, Field(max_length=MAX_MESSAGE_CHARACTERS)]
Count = Annotated[int, Field(ge=0)]


class JobPhase(StrEnum):
    """The state of a job in one word for people; programs read the conditions."""

    PENDING = "Pending"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    """It has run, and something that it needs is restarting."""
    INVALID = "Invalid"
    """The spec or a pod template is refused; nothing is created until it changes."""
    EVALUATING = "Evaluating"
    """Training is finished; the last step is being evaluated."""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED})


class Condition(Settings):
    """A condition of a job, in the shape of Kubernetes conditions."""

    type: str
    """One of Suspended, Understood, Provisioned, WeightGroupReady, Running, Degraded, Evaluating,
    Succeeded, Failed.
    """
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=64)]
    """Cause in one word, from a closed list."""
    message: Text = ""
    """Explanation for people."""
    last_transition_time: str
    """When the status of the condition last changed."""
    observed_generation: Count = 0
    """Generation of the spec that the condition describes."""


class LastFailure(Settings):
    """The newest failure of a role."""

    pod: str
    """Name of the pod."""
    reason: str
    """Error, OOMKilled, Evicted, Preempted, NodeLost, Deleted or Ended."""
    exit_code: int | None = None
    """Exit code of the container that failed."""
    message: Text = ""
    """Message of the container or of Kubernetes."""
    time: str
    """When the operator observed it."""


class RoleStatus(Settings):
    """Pods of one role."""

    desired: Count = 0
    """Pods that should exist."""
    created: Count = 0
    """Pods that exist and are not being deleted."""
    scheduled: Count = 0
    """Pods that have a node."""
    ready: Count = 0
    """Pods whose containers are ready."""
    restarts: Count = 0
    """Restarts of pods after a failure. Remembered."""
    drifted: Count = 0
    """Running pods that were made from an older template; a new restart.id replaces them."""
    last_failure: LastFailure | None = None
    """The newest failure. Remembered."""


class FailureRecord(Settings):
    """A failure within the window of the failure policy."""

    time: str
    """When the operator observed it."""
    unit: Annotated[str, Field(max_length=80)]
    """What restarted: one pod, as "actor-3", or "trainer" for all trainers."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node on which it ran."""
    reason: Annotated[str, Field(max_length=64)]
    """Reason as in lastFailure."""
    counted: bool
    """Whether it counts towards failurePolicy.maxRestarts."""


class WeightGroupStatus(Settings):
    """The weight-transfer group."""

    epoch: Count = 0
    """Number of the group; it increases with each change and never decreases. Remembered."""
    world_size: Count = 0
    """Number of ranks: the trainer and all workers of the member generators."""
    members: Annotated[list[str], Field(max_length=MAX_MEMBERS)] = []
    """Generators in the group (the first 256)."""
    num_members: Count = 0
    """Number of generators in the group."""
    state: Text = ""
    """What the group lacks to be complete, for people."""


class StreamStatus(Settings):
    """The sample stream."""

    pending: Count = 0
    """Finished groups that wait to be trained."""
    oldest_seconds: Annotated[float, Field(ge=0)] = 0
    """Age of the oldest waiting group."""


class TrainingStatus(Settings):
    """Progress of training."""

    step: Count = 0
    """Completed optimizer steps."""
    policy_version: int = 0
    """Version of the trainer's weights."""
    lag: float | None = None
    """Mean steps between the version that sampled a token and the one that trained it, in the
    newest step.
    """
    ess: float | None = None
    """Effective sample size as a share of the batch, in the newest step."""
    reward: float | None = None
    """Mean reward of the newest step."""
    samples_per_second: float | None = None
    """Trajectories trained per second."""


class JobStatus(Settings):
    """Status of a PipelineRLJob."""

    phase: JobPhase | None = None
    """The state of the job in one word for people."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """What holds for the job, and why."""
    observed_generation: Count = 0
    """Generation of the spec that this status describes."""
    start_time: str | None = None
    """When the operator started the job, or resumed it after a suspension."""
    running_time: str | None = None
    """When all roles first ran after startTime."""
    completion_time: str | None = None
    """When the job ended."""
    restarts: Count = 0
    """Failures of all roles that led to a restart. Remembered."""
    actors: RoleStatus = RoleStatus()
    """Pods of the actors."""
    trainers: RoleStatus = RoleStatus()
    """Pods of the trainers."""
    preprocessor: RoleStatus = RoleStatus()
    """Pod of the preprocessor."""
    reference: RoleStatus | None = None
    """Pods of the reference model."""
    evaluator: RoleStatus | None = None
    """Pod of the evaluator."""
    autoscale: ScalingChoice | None = None
    """The number of actors chosen by autoscale. Remembered."""
    actor_selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the actors, for autoscalers."""
    restart_id: Annotated[str, Field(max_length=64)] | None = None
    """The restart.id that has been executed; absent for an empty one. Remembered."""
    attempts: Annotated[dict[str, Count], Field(max_length=10000)] = {}
    """Number of restarts of each unit that was restarted. Remembered."""
    complete_trainers: int = -1
    """Newest attempt of the trainers whose pods have all existed at once. Remembered."""
    recent_failures: Annotated[list[FailureRecord], Field(max_length=MAX_FAILURES)] = []
    """Failures within the failure policy's window. Remembered."""
    weight_group: WeightGroupStatus | None = None
    """The weight-transfer group."""
    stream: StreamStatus | None = None
    """The sample stream."""
    training: TrainingStatus | None = None
    """Progress of training, written at most every 15 s, and once more at its end."""

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> "JobStatus":
        """Parses a status. Fields of an older or newer operator are ignored."""
        return cls.model_validate(own_fields(raw or {}), extra="ignore")

    def written(self) -> dict[str, Any]:
        """The document for the API server, without empty strings, which a 1.20 server reads as
        null.
        """
        document: dict[str, Any] = _without_empty_texts(
            self.model_dump(mode="json", by_alias=True, exclude_none=True)
        )
        return document

    @property
    def is_finished(self) -> bool:
        return self.phase in FINISHED

    def condition(self, type_: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == type_), None)

    def holds(self, type_: str) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"


def _without_empty_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty_texts(each) for key, each in value.items() if each != ""}
    return [_without_empty_texts(each) for each in value] if isinstance(value, list) else value


_ALIASES = frozenset(field.alias or name for name, field in JobStatus.model_fields.items())


def own_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a status document that this operator knows."""
    return {key: value for key, value in raw.items() if key in _ALIASES}


def is_urgent(old: JobStatus, new: JobStatus) -> bool:
    """Whether `new` remembers something that `old` does not, which must be written before the
    operator acts on it.
    """
    fields = ("attempts", "recent_failures", "completion_time", "autoscale")
    if any(getattr(old, field) != getattr(new, field) for field in fields):
        return True
    latched = {JobPhase.SUSPENDING, JobPhase.SUSPENDED, *FINISHED}
    return old.phase != new.phase and (old.phase in latched or new.phase in latched)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that turns `old` into `new`."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            both = isinstance(old[key], Mapping) and isinstance(value, Mapping)
            patch[key] = merge_patch(old[key], value) if both else value
    return patch


def write_time(seconds: float) -> str:
    """Formats seconds since the epoch as RFC 3339 with whole seconds, as Kubernetes does."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class ConditionType(StrEnum):
    """Types of conditions: what may be true or false of a job."""

    SUSPENDED = "Suspended"
    UNDERSTOOD = "Understood"
    """Set only for a job whose spec has had fields that the operator does not know."""
    PROVISIONED = "Provisioned"
    WEIGHT_GROUP_READY = "WeightGroupReady"
    RUNNING = "Running"
    DEGRADED = "Degraded"
    EVALUATING = "Evaluating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionReason(StrEnum):
    """Reasons of conditions."""

    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    INVALID_SPEC = "InvalidSpec"
    UNKNOWN_FIELDS = "UnknownFields"
    ALL_KNOWN = "AllFieldsKnown"
    POD_REFUSED = "PodRefused"
    STREAM_UNAVAILABLE = "StreamUnavailable"
    CREATING = "CreatingPods"
    ALL_CREATED = "AllPodsCreated"
    NOT_SCHEDULED = "NotScheduled"
    IMAGE_PULL = "ImagePull"
    CONTAINER_WAITING = "ContainerWaiting"
    STARTING = "Starting"
    ALL_READY = "AllReady"
    FORMING = "Forming"
    FORMED = "Formed"
    BACKING_OFF = "BackingOff"
    RESTARTING = "Restarting"
    AS_IT_SHOULD_BE = "AsItShouldBe"
    TRAINING_FINISHED = "TrainingFinished"
    RESTART_LIMIT = "RestartLimitExceeded"
    FAILURE_RULE = "FailureRule"
    WRONG_SETTINGS = "WrongSettings"
    DEADLINE = "DeadlineExceeded"
    PRE_RUNNING_DEADLINE = "PreRunningDeadlineExceeded"
    FINISHED = "Finished"


def training_status(now: Reading, before: Reading | None) -> TrainingStatus | None:
    """Progress from the trainer's metrics; None before the first step is counted. The rate is that
    between two readings.
    """
    values = now.values
    if "policy_version" not in values:
        return None
    rate = None
    if before is not None and now.at > before.at and "samples_trained_total" in before.values:
        trained = values.get("samples_trained_total", 0.0) - before.values["samples_trained_total"]
        rate = round(trained / (now.at - before.at), 2) if trained >= 0 else None
    return TrainingStatus(
        step=max(0, int(values["policy_version"])),
        policy_version=int(values["policy_version"]),
        lag=_rounded(values.get("lag_mean")),
        ess=_rounded(values.get("ess")),
        reward=_rounded(values.get("reward_mean")),
        samples_per_second=rate,
    )


def last_training_status(message: str, before: TrainingStatus | None) -> TrainingStatus | None:
    """Progress from the message that the trainer's container left, None without it. The rate, which
    the message lacks, is that of `before`.
    """
    last = training_status(Reading(0.0, parse_metrics(message.encode())), None)
    if last is None or before is None:
        return last
    return last.model_copy(update={"samples_per_second": before.samples_per_second})


def stream_status(now: Reading) -> StreamStatus | None:
    """The sample stream from the preprocessor's metrics; None before it is measured."""
    pending = now.values.get("stream_messages")
    if pending is None:
        return None
    return StreamStatus(
        pending=max(0, int(pending)),
        oldest_seconds=round(now.values.get("queue_oldest_seconds/stream", 0.0), 1),
    )


def _rounded(value: float | None) -> float | None:
    """Rounds to 4 digits: enough for a table, and noise does not cause writes."""
    return None if value is None else float(f"{value:.4g}")
