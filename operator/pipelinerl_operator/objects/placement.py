"""Which nodes a pod prefers and which it must not use, beside what the user's template says."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import selector


def affinity(
    given: Mapping[str, Any] | None, job: JobResource, excluded_nodes: Sequence[str]
) -> dict[str, Any]:
    """`given` is the template's. The pods of the job prefer one network domain; excluded nodes are
    out of the question.
    """
    combined = deepcopy(dict(given or {}))
    if job.spec.scheduling.topology_key is not None:
        _prefer_domain(combined, job, job.spec.scheduling.topology_key)
    if excluded_nodes:
        _exclude(combined, excluded_nodes)
    return combined


def _prefer_domain(combined: dict[str, Any], job: JobResource, key: str) -> None:
    term = {"topologyKey": key, "labelSelector": {"matchLabels": selector(job.name)}}
    preferred = combined.setdefault("podAffinity", {}).setdefault(
        "preferredDuringSchedulingIgnoredDuringExecution", []
    )
    preferred.append({"weight": 100, "podAffinityTerm": term})


def _exclude(combined: dict[str, Any], names: Sequence[str]) -> None:
    """Terms are alternatives, so each must exclude the nodes. A field matches one name at a time."""
    avoid = [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]}
        for name in sorted(set(names))
    ]
    required = combined.setdefault("nodeAffinity", {}).setdefault(
        "requiredDuringSchedulingIgnoredDuringExecution", {}
    )
    terms = required.setdefault("nodeSelectorTerms", []) or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", []), *avoid]} for term in terms
    ]
