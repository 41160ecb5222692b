"""Pods without containers: writes the status that a kubelet would report, immediately."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.kube import Api, Change, Object, ObjectKey, Selection
from pipelinerl_operator.kube.errors import Gone, NotFound
from pipelinerl_operator.kube.resources import PODS, key_of

RETRY_S = 0.2
MAX_AT_ONCE = 16


def running(pod: Object) -> dict[str, Any]:
    """Status of a pod all of whose containers run and are ready."""
    containers = [
        {
            "name": container["name"],
            "ready": True,
            "restartCount": 0,
            "image": container["image"],
            "imageID": "",
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }
        for container in pod["spec"]["containers"]
    ]
    conditions = [
        {"type": type_, "status": "True"}
        for type_ in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    return {"phase": "Running", "conditions": conditions, "containerStatuses": containers}


def ended(
    pod: Object, exit_codes: Mapping[str, int] | None = None, reason: str = ""
) -> dict[str, Any]:
    """Status of a pod that has ended: Succeeded, or Failed when a container's exit code in
    `exit_codes` is not 0.
    """
    codes = {
        container["name"]: (exit_codes or {}).get(container["name"], 0)
        for container in pod["spec"]["containers"]
    }
    containers = [
        {
            "name": name,
            "ready": False,
            "restartCount": 0,
            "image": "",
            "imageID": "",
            "state": {
                "terminated": {
                    "exitCode": code,
                    "reason": reason or ("Error" if code else "Completed"),
                    "finishedAt": "2026-01-01T00:00:00Z",
                }
            },
        }
        for name, code in codes.items()
    ]
    phase = "Failed" if any(codes.values()) else "Succeeded"
    return {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": containers,
    }


class HollowPods:
    """Reports every new pod as running. Use `await pods.run()` as a task."""

    def __init__(self, api: Api) -> None:
        self.started = 0
        self._api = api
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> None:
        """Watches the pods until cancelled; lists them again after any failure of the watch."""
        selection = Selection(PODS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                since = ""
                try:
                    async for page in self._api.pages(selection):
                        since = page.resource_version
                        for pod in page.items:
                            self._begin(tasks, pod)
                    async for event in self._api.watch(selection, since):
                        if event.change is Change.ADDED:
                            self._begin(tasks, event.body)
                except Gone:
                    continue
                except PipelineRLError:
                    await asyncio.sleep(RETRY_S)

    def _begin(self, tasks: asyncio.TaskGroup, pod: Object) -> None:
        if (pod.get("status") or {}).get(
            "phase", "Pending"
        ) == "Pending" and "deletionTimestamp" not in pod["metadata"]:
            tasks.create_task(self._start(pod))

    async def _start(self, pod: Object) -> None:
        key = key_of(pod)
        while True:
            async with self._turns:
                try:
                    await say(self._api, key, running(pod))
                    self.started += 1
                    return
                except NotFound:
                    return
                except PipelineRLError:  # a Conflict too: the pod has changed or gone meanwhile
                    pass
            await asyncio.sleep(RETRY_S)


async def say(api: Api, pod: ObjectKey, status: dict[str, Any]) -> None:
    """Writes a pod's status, as its kubelet would."""
    await api.patch(PODS, *pod, {"status": status}, "status")
