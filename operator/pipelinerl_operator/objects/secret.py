"""The job's Secret, apart from the other objects: what is in it is made once and never again."""

from typing import Any

from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import metadata, secret_name
from pipelinerl_operator.objects.ports import NATS_KEY, TOKEN_KEY


def job_secret(job: JobResource, token: str, nats_credentials: str | None = None) -> dict[str, Any]:
    """`<job>-token`: bearer token of the weight endpoints and gRPC services, and the stream's
    credentials where it has some.
    """
    data = {
        TOKEN_KEY: token,
        **({NATS_KEY: nats_credentials} if nats_credentials is not None else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job.name)),
        "type": "Opaque",
        "stringData": data,
    }
