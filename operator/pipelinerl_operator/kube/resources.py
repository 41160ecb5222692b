"""The kinds of objects that the operator uses, and the rights on them that its code needs.

The chart's roles are tested against these rights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, NamedTuple

Object = dict[str, Any]
"""A Kubernetes object as the API server sends it."""


class ObjectKey(NamedTuple):
    """Namespace (empty where a kind has none) and name: ObjectKey("default", "sums-actor-0")."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects; the core group is empty.

    Example: Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy").
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path. `namespace` None is every namespace (or a resource without namespaces)."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return "/".join(
            part for part in (f"{root}{scope}/{self.plural}", name, subresource) if part
        )


JOBS = Resource("pipelinerl.dev", "v1alpha1", "pipelinerljobs", "PipelineRLJob")
PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICES = Resource("", "v1", "services", "Service")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
EVENTS = Resource("", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
DISRUPTION_BUDGETS_V1BETA1 = Resource(
    "policy", "v1beta1", "poddisruptionbudgets", "PodDisruptionBudget"
)
VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
COSCHEDULING_POD_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")

ALL = (
    JOBS,
    PODS,
    SECRETS,
    CONFIG_MAPS,
    SERVICES,
    SERVICE_ACCOUNTS,
    EVENTS,
    LEASES,
    NETWORK_POLICIES,
    DISRUPTION_BUDGETS,
    DISRUPTION_BUDGETS_V1BETA1,
    VOLCANO_POD_GROUPS,
    COSCHEDULING_POD_GROUPS,
)

_BY_TYPE = {(resource.api_version, resource.kind): resource for resource in ALL}


def resource_of(body: Mapping[str, Any]) -> Resource:
    """The resource of an object. Raises KeyError for a kind that the operator does not use."""
    return _BY_TYPE[body["apiVersion"], body["kind"]]


def key_of(body: Mapping[str, Any]) -> ObjectKey:
    metadata = body["metadata"]
    return ObjectKey(intern(metadata.get("namespace", "")), metadata["name"])


def controller_uid(body: Mapping[str, Any]) -> str:
    """UID of the object's controlling owner, empty without one."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), "")


class Permission(NamedTuple):
    """Verbs on a resource, or on its sub-resource as "pods/status"."""

    group: str
    resource: str
    verbs: frozenset[str]


def _permission(resource: Resource, *verbs: str, subresource: str = "") -> Permission:
    plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return Permission(resource.group, plural, frozenset(verbs))


_CHILD_VERBS = ("get", "list", "watch", "create", "patch", "delete")

JOB_NAMESPACES: tuple[Permission, ...] = (
    _permission(JOBS, "list", "watch", "patch", "delete"),
    _permission(JOBS, "patch", subresource="status"),
    # required by OwnerReferencesPermissionEnforcement (OpenShift)
    _permission(JOBS, "update", subresource="finalizers"),
    _permission(PODS, "get", "list", "watch", "create", "delete"),
    _permission(SECRETS, "get", "create"),
    _permission(CONFIG_MAPS, *_CHILD_VERBS),
    _permission(SERVICES, *_CHILD_VERBS),
    _permission(SERVICE_ACCOUNTS, *_CHILD_VERBS),
    _permission(NETWORK_POLICIES, *_CHILD_VERBS),
    _permission(DISRUPTION_BUDGETS, *_CHILD_VERBS),
    _permission(EVENTS, "create"),
)
"""Rights in every namespace with jobs; a ClusterRole without `watchNamespaces`."""

GANG_NAMESPACES: tuple[Permission, ...] = (
    _permission(VOLCANO_POD_GROUPS, *_CHILD_VERBS),
    _permission(COSCHEDULING_POD_GROUPS, *_CHILD_VERBS),
)
"""Rights in the same namespaces where the cluster has such PodGroups."""

OWN_NAMESPACE: tuple[Permission, ...] = (
    _permission(LEASES, "get", "create", "update"),
    _permission(PODS, "list", "patch"),  # the leader's label
    _permission(SECRETS, "get", "create"),  # the keys of the stream server
)
"""Rights in the operator's own namespace."""
