"""`status` of a PipelineRLJob: what people read, and what the operator must remember across its own
restarts.

Everything here is derived from what is observed, except what is marked as remembered: those facts
are written before anything is done about them, so that a crash between any two writes loses and
doubles nothing.

How training goes, read from the metrics of the job's own processes.
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
    """One word for people; programs read the conditions."""

    PENDING = "Pending"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    """It has run, and something that it needs is being started again."""
    INVALID = "Invalid"
    """The spec or a pod template is refused; nothing is created until it is changed."""
    EVALUATING = "Evaluating"
    """Training is finished; the last step is being evaluated."""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED})


class Condition(Settings):
    type: str
    """One of Suspended, Understood, Provisioned, WeightGroupReady, Running, Degraded, Evaluating,
    Succeeded, Failed.
    """
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=64)]
    """One word from a closed list."""
    message: Text = ""
    """For people."""
    last_transition_time: str
    """When `status` last changed."""
    observed_generation: Count = 0
    """Generation of the spec that it speaks of."""


class LastFailure(Settings):
    pod: str
    """Name of the pod."""
    reason: str
    """Error, OOMKilled, Evicted, Preempted, NodeLost, Deleted or Ended."""
    exit_code: int | None = None
    """Of the container that failed."""
    message: Text = ""
    """What the container or Kubernetes said."""
    time: str
    """When the operator saw it."""


class RoleStatus(Settings):
    desired: Count = 0
    """Pods that should exist."""
    created: Count = 0
    """Pods that exist and are not being deleted."""
    scheduled: Count = 0
    """Pods that have a node."""
    ready: Count = 0
    """Pods whose containers are ready."""
    restarts: Count = 0
    """Pods started again after a failure. Remembered."""
    drifted: Count = 0
    """Running pods that were made from another template than the current one; a new restart.id
    takes it over.
    """
    last_failure: LastFailure | None = None
    """The newest failure. Remembered."""


class FailureRecord(Settings):
    time: str
    """When the operator saw it."""
    unit: Annotated[str, Field(max_length=80)]
    """What was restarted: a pod as "actor-3", or "trainer" for all of them."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Where it ran."""
    reason: Annotated[str, Field(max_length=64)]
    """As in lastFailure."""
    counted: bool
    """Whether it counts towards failurePolicy.maxRestarts."""


class WeightGroupStatus(Settings):
    epoch: Count = 0
    """Grows whenever the group changes, never back. Remembered."""
    world_size: Count = 0
    """The trainer and every worker of the member generators."""
    members: Annotated[list[str], Field(max_length=MAX_MEMBERS)] = []
    """Generators in the group (the first 256)."""
    num_members: Count = 0
    """How many there are."""
    state: Text = ""
    """What keeps the group from being complete, for people."""


class StreamStatus(Settings):
    pending: Count = 0
    """Finished groups that wait for training."""
    oldest_seconds: Annotated[float, Field(ge=0)] = 0
    """Age of the oldest of them."""


class TrainingStatus(Settings):
    step: Count = 0
    """Optimizer steps done."""
    policy_version: int = 0
    """Of the trainer's weights."""
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
    phase: JobPhase | None = None
    """One word for people."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """What holds, and why."""
    observed_generation: Count = 0
    """Generation of the spec that this status speaks of."""
    start_time: str | None = None
    """When the operator began with it, or took it up again after a suspension."""
    running_time: str | None = None
    """When every role first ran since startTime."""
    completion_time: str | None = None
    """When it ended."""
    restarts: Count = 0
    """Failures of all roles after which something was started again. Remembered."""
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
    """What autoscale has chosen. Remembered."""
    actor_selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the actors, for autoscalers."""
    restart_id: Annotated[str, Field(max_length=64)] | None = None
    """The spec's restart.id that has been carried out, absent for an empty one. Remembered."""
    attempts: Annotated[dict[str, Count], Field(max_length=10000)] = {}
    """How often each unit was started again, where it was. Remembered."""
    complete_trainers: int = -1
    """The newest attempt of the trainers of which every pod has existed at once. Remembered."""
    recent_failures: Annotated[list[FailureRecord], Field(max_length=MAX_FAILURES)] = []
    """Failures within the failure policy's window. Remembered."""
    weight_group: WeightGroupStatus | None = None
    """The weight-transfer group."""
    stream: StreamStatus | None = None
    """The sample stream."""
    training: TrainingStatus | None = None
    """How training goes: written at most every 15 s while it runs, and as it was at its end."""

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None) -> "JobStatus":
        """What an older or newer operator wrote beside these fields is passed over."""
        return cls.model_validate(own_fields(raw or {}), extra="ignore")

    def written(self) -> dict[str, Any]:
        """As it lies in the API server. What is empty is left out: a server of 1.20 takes an empty
        string for null.
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
    """Of a status as it lies in the API server, what this operator knows."""
    return {key: value for key, value in raw.items() if key in _ALIASES}


REMEMBERED = frozenset(
    {
        "phase",
        "attempts",
        "recent_failures",
        "restart_id",
        "completion_time",
        "complete_trainers",
        "autoscale",
    }
)
"""Fields whose change must be written before it is acted on."""


def is_urgent(old: JobStatus, new: JobStatus) -> bool:
    """Whether `new` remembers something that `old` does not, so that it must be written before
    anything is done about it.
    """
    if (
        old.attempts != new.attempts
        or old.recent_failures != new.recent_failures
        or old.completion_time != new.completion_time
    ):
        return True
    if old.autoscale != new.autoscale:
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
    """Seconds since the epoch as RFC 3339 with whole seconds, as Kubernetes has it."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class ConditionType(StrEnum):
    SUSPENDED = "Suspended"
    UNDERSTOOD = "Understood"
    """Only of a job whose spec has had fields that the operator does not know."""
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
    NAME_TAKEN = "NameTaken"
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
    NO_MEMBERS = "NoMembers"
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
    """From the trainer's metrics; None before the first step is counted. The rate is over the time
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
    """From what the trainer left as its container's message; the rate, which it lacks, stays that
    of `before`. None without.
    """
    last = training_status(Reading(0.0, parse_metrics(message.encode())), None)
    if last is None or before is None:
        return last
    return last.model_copy(update={"samples_per_second": before.samples_per_second})


def stream_status(now: Reading) -> StreamStatus | None:
    """From the preprocessor's metrics."""
    pending = now.values.get("stream_messages")
    if pending is None:
        return None
    return StreamStatus(
        pending=max(0, int(pending)),
        oldest_seconds=round(now.values.get("queue_oldest_seconds/stream", 0.0), 1),
    )


def _rounded(value: float | None) -> float | None:
    """Digits enough for a table, few enough that noise is no reason to write."""
    return None if value is None else float(f"{value:.4g}")
