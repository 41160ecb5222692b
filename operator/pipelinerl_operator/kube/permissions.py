"""Every right that the operator's code uses. The chart's roles are tested against this table."""

from typing import NamedTuple

from pipelinerl_operator.kube.resources import (
    CONFIG_MAPS,
    COSCHEDULING_POD_GROUPS,
    DISRUPTION_BUDGETS,
    EVENTS,
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Resource,
)


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
    _permission(
        JOBS, "update", subresource="finalizers"
    ),  # asked for by OwnerReferencesPermissionEnforcement (OpenShift)
    _permission(PODS, "get", "list", "watch", "create", "delete"),
    _permission(SECRETS, "get", "create"),
    _permission(CONFIG_MAPS, *_CHILD_VERBS),
    _permission(SERVICES, *_CHILD_VERBS),
    _permission(SERVICE_ACCOUNTS, *_CHILD_VERBS),
    _permission(NETWORK_POLICIES, *_CHILD_VERBS),
    _permission(DISRUPTION_BUDGETS, *_CHILD_VERBS),
    _permission(EVENTS, "create"),
)
"""In every namespace whose jobs it serves; a ClusterRole without `watchNamespaces`."""

GANG_NAMESPACES: tuple[Permission, ...] = (
    _permission(VOLCANO_POD_GROUPS, *_CHILD_VERBS),
    _permission(COSCHEDULING_POD_GROUPS, *_CHILD_VERBS),
)
"""As above, where the cluster has such PodGroups."""

OWN_NAMESPACE: tuple[Permission, ...] = (
    _permission(LEASES, "get", "create", "update"),
    _permission(PODS, "list", "patch"),  # the label of the leader
    _permission(SECRETS, "get", "create"),  # the keys of the stream's server
)
"""In the operator's own namespace."""
