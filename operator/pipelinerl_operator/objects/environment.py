"""Environment variables of the containers."""

from typing import Any

from pipelinerl_common.settings import JobSpec
from pipelinerl_control.plan import Role
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.labels import ATTEMPT
from pipelinerl_operator.objects.volumes import CACHE

RESERVED_PREFIX = "PRL_"

_FOLDERS = {
    "HOME": CACHE,
    "XDG_CACHE_HOME": CACHE / "xdg",
    "HF_HOME": CACHE / "huggingface",
    "TRITON_CACHE_DIR": CACHE / "triton",
    "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor",
    "VLLM_CACHE_ROOT": CACHE / "vllm",
}


def environment(job: JobResource, role: Role, index: int) -> list[dict[str, Any]]:
    """The operator's variables first, so that the user's may refer to them."""
    contract = {
        "PRL_JOB": job.name,
        "PRL_NAMESPACE": job.namespace,
        "PRL_ROLE": role.value,
        "PRL_INDEX": str(index),
    }
    fields = {
        "PRL_ATTEMPT": f"metadata.labels['{ATTEMPT}']",
        "PRL_POD_IP": "status.podIP",
        "PRL_POD_UID": "metadata.uid",
    }
    folders = {name: str(path) for name, path in _FOLDERS.items()}
    # A user name, because libraries ask for one and a cluster may run the image under an id that
    # has none.
    fixed = {"USER": "pipelinerl", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [
        *({"name": name, "value": value} for name, value in contract.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
        *(
            {"name": name, "value": value}
            for name, value in (folders | fixed | _interface(job.spec)).items()
        ),
        *(each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in job.spec.env),
    ]


def _interface(spec: JobSpec) -> dict[str, str]:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return {name: spec.network.interface for name in names} if spec.network.interface else {}
