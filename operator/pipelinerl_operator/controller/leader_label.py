"""The label by which the coordinator's Service finds the leader: set on its own pod, taken off its
release's others.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.kube import Api, ObjectKey, Selection
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import PODS, key_of
from pipelinerl_operator.objects.labels import PREFIX

log = logging.getLogger(__name__)

LEADER = f"{PREFIX}leader"


@asynccontextmanager
async def leader_label(
    api: Api, pod: ObjectKey | None, release: Mapping[str, str]
) -> AsyncIterator[None]:
    """While the block runs, `pod` alone has the label among the pods with the labels `release`:
    other releases may live in its namespace. None, outside of a cluster, does nothing. Raises
    PipelineRLError.
    """
    if pod is None:
        yield
        return
    labels = ",".join(f"{key}={value}" for key, value in {**release, LEADER: "true"}.items())
    async for page in api.pages(Selection(PODS, pod.namespace, labels)):
        for other in page.items:
            if key_of(other) != pod:
                await _label(api, key_of(other), None)
    await _label(api, pod, "true")
    try:
        yield
    finally:
        try:
            await _label(api, pod, None)
        except PipelineRLError as error:  # the next leader takes it off
            log.warning("pod=%s keeps the leader's label: %s", pod, error)


async def _label(api: Api, pod: ObjectKey, value: str | None) -> None:
    try:
        await api.patch(PODS, pod.namespace, pod.name, {"metadata": {"labels": {LEADER: value}}})
    except NotFound:
        if value is not None:
            raise
