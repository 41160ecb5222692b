"""What only Kubernetes reads: images, scheduling, network, restarts, deadlines. `pipelinerl up`
passes over these fields.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipelinerl_common.settings.base import Settings

Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")]
ObjectName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
LabelKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9][-A-Za-z0-9_.]*$",
    ),
]
Quantity = Annotated[
    str,
    Field(
        min_length=1,
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$",
    ),
]
PodTemplate = dict[str, JsonValue]
"""metadata (labels, annotations) and spec of a pod, laid over the operator's own by container and
volume name.
"""
Seconds = Annotated[int, Field(ge=0, le=315360000)]


class SecretReference(Settings):
    name: ObjectName
    """Name of a Secret in the job's namespace."""


class KeyReference(Settings):
    name: ObjectName
    """Name of the Secret or ConfigMap, in the job's namespace."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in it."""
    optional: bool = False
    """Whether the variable is left out where the key does not exist; otherwise the pod waits for
    it.
    """


class FieldReference(Settings):
    field_path: Annotated[str, Field(min_length=1, max_length=317)]
    """Field of the pod, for example status.hostIP."""


class VariableSource(Settings):
    """As in a pod."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""
    field_ref: FieldReference | None = None
    """A field of the pod."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.secret_key_ref, self.config_map_key_ref, self.field_ref].count(None) != 2:
            raise ValueError(
                "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef"
            )
        return self


class EnvironmentVariable(Settings):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=256)]
    """Name of the variable. Names that begin with PRL_ are the operator's."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Its value; $(NAME) stands for a variable before it."""
    value_from: VariableSource | None = None
    """Where the value comes from instead."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise ValueError(
                f"env {self.name}: value and valueFrom exclude each other; leave one of them out"
            )
        if self.name.startswith("PRL_"):
            raise ValueError(
                f"env {self.name}: names that begin with PRL_ are set by the operator; choose "
                "another name"
            )
        return self


class EmptyDirSettings(Settings):
    size_limit: Quantity | None = None
    """Most that the folder may hold; the pod is evicted beyond it."""


class ModelCacheSettings(Settings):
    pvc: ObjectName | None = None
    """PersistentVolumeClaim that keeps downloaded and made models; one that many nodes can mount
    when pods run on several.
    """
    empty_dir: EmptyDirSettings | None = None
    """A folder of each pod's own, filled at each start. This is the default."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.pvc is None) == (self.empty_dir is None):
            raise ValueError(
                "model.cache needs exactly one of pvc and emptyDir: {pvc: NAME} or {emptyDir: {}}"
            )
        return self


class GangSettings(Settings):
    backend: Literal["none", "volcano", "coscheduling"] = "none"
    """Who places the pods that must run together (trainers, preprocessor and the first
    actors.minReplicas actors) all at once or not at all: nobody, Volcano, or the coscheduling
    plugin.
    """
    queue: Annotated[str, Field(max_length=253)] | None = None
    """Volcano's queue."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """`coscheduling`: how long placed pods wait for the rest."""


class SchedulingSettings(Settings):
    scheduler_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Scheduler of every pod; unset takes the gang's, or the cluster's own."""
    gang: GangSettings = GangSettings()
    """Scheduling of the pods that must run together."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of every pod; a podTemplate's own goes first."""
    topology_key: LabelKey | None = None
    """Node label of a fast network domain, for example a rack: the pods of the job prefer to share
    its value.
    """


class RdmaSettings(Settings):
    resource_name: LabelKey
    """Extended resource of the RDMA device, for example rdma/hca, as the cluster's device plugin
    names it.
    """
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices per pod with GPUs."""
    ipc_lock: bool = False
    """Adds the capability IPC_LOCK. Namespaces with the pod security level `restricted` or
    `baseline` refuse it; leave it off where the container runtime does not limit locked memory.
    """


class NetworkSettings(Settings):
    rdma: RdmaSettings | None = None
    """RDMA devices for the weight transfer and the trainers' collectives."""
    interface: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Network interface of collectives, for example eth0 (sets NCCL_SOCKET_IFNAME and
    GLOO_SOCKET_IFNAME).
    """


class BackoffSettings(Settings):
    initial_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Wait before the first restart; it doubles with each one."""
    max_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Longest wait."""


class FailureRule(Settings):
    action: Literal["FailJob", "Restart", "RestartUncounted"]
    """`FailJob` ends the job, `Restart` restarts and counts, `RestartUncounted` restarts without
    counting.
    """
    role: Literal["actor", "preprocessor", "trainer", "reference", "evaluator"] | None = None
    """Only failures of this role; unset means every role."""
    exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = []
    """Only these exit codes; none means any."""
    reasons: Annotated[
        list[Literal["Error", "OOMKilled", "Evicted", "Preempted", "NodeLost", "ImagePull"]],
        Field(max_length=8),
    ] = []
    """Only these reasons; none means any."""


class FailurePolicySettings(Settings):
    max_restarts: Annotated[int, Field(ge=0, le=100000)] = 10
    """Restarts that count, within the window, before the job fails. Out-of-memory kills, evictions,
    preemptions, lost nodes and image pulls do not count, unless a rule says so.
    """
    window_seconds: Annotated[int, Field(ge=1, le=31536000)] = 3600
    """Restarts older than this are forgotten."""
    backoff: BackoffSettings = BackoffSettings()
    """Waits between restarts of the same pod."""
    terminating_pod_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """A pod that is still terminating this long after its grace period, as on a dead node, is
    removed by force.
    """
    exclude_node_after: Annotated[int, Field(ge=0, le=100)] = 3
    """Failures on a node within the window before the job's pods avoid it; 0 never avoids one."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """The first rule that matches a failure decides; without one the defaults do."""


class RestartSettings(Settings):
    id: Annotated[str, Field(max_length=64)] = ""
    """Any change restarts the job's pods, the trainers from the newest checkpoint. Also takes over
    changed templates.
    """
