"""Jobs and contexts that tests of the operator share."""

from copy import deepcopy
from typing import Any

from pipelinerl_operator.objects import Capabilities, JobResource, OperatorContext
from pipelinerl_operator.objects.names import POD_ROLES

ON_CPU = {"weightTransfer": {"backend": "gloo"}}
OLD = Capabilities(20, frozenset({"policy/v1beta1"}))
"""A 1.20 server."""


def make_raw(name: str = "sums", **spec: Any) -> dict[str, Any]:
    """The resource as the API server gives it; sections in `spec` replace the small job's own."""
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": name, "namespace": "lab", "uid": "0b5b0d7c-a09c", "generation": 1},
        "spec": deepcopy(
            {
                "model": {"uri": "tiny://arithmetic"},
                "task": {"path": "tasks:Sums"},
                **ON_CPU,
                **spec,
            }
        ),
    }


def make_resource(name: str = "sums", **spec: Any) -> JobResource:
    return JobResource.parse(make_raw(name, **spec))


def make_context(**changes: Any) -> OperatorContext:
    return OperatorContext(
        **{
            "images": {role: f"registry/{role.value}:1" for role in POD_ROLES},
            "coordinator": "operator.system.svc:7100",
            "nats_url": "nats://nats.system.svc:4222",
            **changes,
        }
    )
