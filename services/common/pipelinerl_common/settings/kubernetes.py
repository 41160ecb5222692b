"""Settings that only Kubernetes reads: images, scheduling, network, restarts, deadlines.
`pipelinerl up` ignores these fields.
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
"""`metadata` (labels, annotations) and `spec` of a pod, merged over the operator's own by the names
of containers and volumes.
"""
Seconds = Annotated[int, Field(ge=0, le=315360000)]


class SecretReference(Settings):
    """A Secret."""

    name: ObjectName
    """Name of a Secret in the job's namespace."""


class KeyReference(Settings):
    """A key of a Secret or a ConfigMap."""

    name: ObjectName
    """Name of the Secret or ConfigMap, in the job's namespace."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in the Secret or ConfigMap."""
    optional: bool = False
    """Leaves the variable out when the key does not exist; otherwise the pod waits for the key."""


class FieldReference(Settings):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=317)]
    """Path of a field of the pod, for example status.hostIP."""


class VariableSource(Settings):
    """The source of an environment variable's value, as in a pod."""

    secret_key_ref: KeyReference | None = None
    """Key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """Key of a ConfigMap."""
    field_ref: FieldReference | None = None
    """Field of the pod."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.secret_key_ref, self.config_map_key_ref, self.field_ref].count(None) != 2:
            raise ValueError(
                "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef"
            )
        return self


class EnvironmentVariable(Settings):
    """An environment variable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=256)]
    """Name of the variable. Names that begin with PRL_ are reserved for the operator."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Value of the variable; $(NAME) is replaced by an earlier variable."""
    value_from: VariableSource | None = None
    """Source of the value, instead of `value`."""

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
    """A folder that lives as long as its pod."""

    size_limit: Quantity | None = None
    """Largest size of the folder; the pod is evicted beyond it. Unset: no limit."""


class ModelCacheSettings(Settings):
    """Where pods store models."""

    pvc: ObjectName | None = None
    """PersistentVolumeClaim for downloaded and created models; pods on several nodes need one that
    many nodes can mount.
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
    """All-or-nothing scheduling of the pods that must run together: trainers, preprocessor and the
    first `actors.minReplicas` actors.
    """

    backend: Literal["none", "volcano", "coscheduling"] = "none"
    """Scheduler that places trainers, preprocessor and the first `actors.minReplicas` actors all
    together or not at all.
    """
    queue: Annotated[str, Field(max_length=253)] | None = None
    """Queue of Volcano."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Time in seconds that placed pods wait for the others, with `coscheduling`."""


class SchedulingSettings(Settings):
    """Placement of the job's pods."""

    scheduler_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Scheduler of every pod. Unset: that of `gang.backend`, else the cluster's default."""
    gang: GangSettings = GangSettings()
    """Scheduling of the pods that must run together."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of every pod; that of a podTemplate takes precedence."""
    topology_key: LabelKey | None = None
    """Node label of a fast network domain, for example a rack; the job's pods prefer nodes that
    share its value.
    """


class RdmaSettings(Settings):
    """RDMA devices of pods with GPUs."""

    resource_name: LabelKey
    """Extended resource of the RDMA device as the cluster's device plugin names it, for example
    rdma/hca.
    """
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices for each GPU of a container: 1 where every GPU has a network card of its
    own, and where the resource is shared by all containers of a node.
    """
    ipc_lock: bool = False
    """Adds the capability IPC_LOCK, needed where the container runtime limits locked memory. Pod
    security levels `restricted` and `baseline` refuse it.
    """


class NetworkSettings(Settings):
    """Network devices of the job's pods."""

    rdma: RdmaSettings | None = None
    """RDMA devices for the weight transfer and the trainers' collectives. Unset: none."""
    interface: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Network interface of collectives, for example eth0 (sets NCCL_SOCKET_IFNAME and
    GLOO_SOCKET_IFNAME).
    """
    nccl_interface: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """NCCL's own interfaces, for example ^docker,lo (sets NCCL_SOCKET_IFNAME, whose prefixes and
    exceptions gloo does not know). Unset: `interface`.
    """


class BackoffSettings(Settings):
    """Delays between restarts of the same pod."""

    initial_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Delay before the first restart in seconds; it doubles with each restart."""
    max_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Longest delay in seconds."""


class FailureRule(Settings):
    """A rule for failures."""

    action: Literal["FailJob", "Restart", "RestartUncounted"]
    """`FailJob` ends the job, `Restart` restarts the pod and counts it, `RestartUncounted` restarts
    it without counting.
    """
    role: Literal["actor", "preprocessor", "trainer", "reference", "evaluator"] | None = None
    """Role whose failures match. Unset: every role."""
    exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = []
    """Exit codes that match; an empty list matches any."""
    reasons: Annotated[
        list[Literal["Error", "OOMKilled", "Evicted", "Preempted", "NodeLost", "ImagePull"]],
        Field(max_length=8),
    ] = []
    """Reasons of the failure that match; an empty list matches any."""


class FailurePolicySettings(Settings):
    """Restarts after failures, and their limits."""

    max_restarts: Annotated[int, Field(ge=0, le=100000)] = 10
    """Counted restarts within the window after which the job fails. Out-of-memory kills, evictions,
    preemptions, lost nodes and failed image pulls count only by a rule.
    """
    window_seconds: Annotated[int, Field(ge=1, le=31536000)] = 3600
    """Length of the window in seconds; older restarts are not counted."""
    backoff: BackoffSettings = BackoffSettings()
    """Delays between restarts of the same pod."""
    terminating_pod_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Time in seconds after its grace period at which a terminating pod is deleted by force."""
    exclude_node_after: Annotated[int, Field(ge=0, le=100)] = 3
    """Failures on a node within the window after which the job's pods avoid it; 0 avoids none."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """Rules for failures. The first that matches decides; without a match the defaults apply."""


class RestartSettings(Settings):
    """Restarts on request."""

    id: Annotated[str, Field(max_length=64)] = ""
    """Any text. A change restarts the job's pods, the trainers from the newest checkpoint, and
    applies changed templates.
    """
