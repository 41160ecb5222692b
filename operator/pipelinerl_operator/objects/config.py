"""ConfigMap with the job as services read it, and the ServiceAccount of its pods."""

from typing import Any

from pipelinerl_common.settings import API_VERSION, KIND, JobSpec, service_view
from pipelinerl_common.settings.load import write_yaml
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import config_name, metadata
from pipelinerl_operator.objects.ports import NATS_CA_KEY

JOB_KEY = "job.yaml"
SCALING = ("replicas", "minReplicas", "maxReplicas")
"""Fields of `actors`."""


def service_spec(spec: JobSpec) -> dict[str, Any]:
    """What the job says, as far as services read it.

    Without what only Kubernetes reads; without what is said about the number of actors, which
    changes while services run; and without defaults: a job's image may be of another release than
    the operator, which knows fields that the other does not.
    """
    view = service_view(spec)
    view.pop("autoscale")
    for field in SCALING:
        view["actors"].pop(field, None)
    return JobSpec.model_validate(view).model_dump(
        mode="json", by_alias=True, exclude_defaults=True
    )


def config_map(job: JobResource, nats_ca: str | None = None) -> dict[str, Any]:
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": service_spec(job.spec),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, config_name(job.name)),
        "data": {
            JOB_KEY: write_yaml(document),
            **({NATS_CA_KEY: nats_ca} if nats_ca else {}),
        },
    }


def service_account(job: JobResource) -> dict[str, Any]:
    """Pods do not speak to the API server: no token is mounted."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, job.name),
        "automountServiceAccountToken": False,
    }
