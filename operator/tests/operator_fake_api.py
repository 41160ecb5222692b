"""An API server in memory behind our own port: names, UIDs, resource versions, preconditions,
graceful deletion, garbage collection, watches; and faults where a test wants them.
"""

import asyncio
import base64
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipelinerl_operator.kube import (
    Api,
    Change,
    Object,
    ObjectKey,
    Page,
    Resource,
    Selection,
    WatchEvent,
)
from pipelinerl_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Gone, NotFound
from pipelinerl_operator.kube.resources import JOBS, PODS, SECRETS

GRACE_S = 30


class Crash(BaseException):
    """The operator's process ends here."""


@dataclass(frozen=True)
class Call:
    verb: str
    resource: Resource
    name: str
    body: Any = None


@dataclass(frozen=True)
class Fault:
    """Raised instead of the call, or, with `answer_lost`, after it was carried out."""

    error: BaseException
    answer_lost: bool = False


class FakeApi(Api):
    """`fault` is asked before every write."""

    def __init__(self, clock: Callable[[], float] = lambda: 1_000_000.0) -> None:
        self.objects: dict[tuple[Resource, ObjectKey], Object] = {}
        self.writes: list[Call] = []
        self.fault: Callable[[Call], Fault | None] = lambda call: None
        self.terminating: set[str] = set()
        """Namespaces that are going."""
        self.before_create: Callable[[Call], None] = lambda call: None
        """Raises to refuse an object, as admission does."""
        self.log: list[tuple[int, Resource, WatchEvent]] = []
        self.oldest = 0
        """Watches from before this version are gone."""
        self.version = 0
        self.news = asyncio.Event()
        self._clock = clock

    # reading

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return copy.deepcopy(self._find(resource, ObjectKey(namespace or "", name)))

    async def pages(self, selection: Selection) -> AsyncIterator[Page]:
        yield Page(self.list(selection), str(self.version))

    async def watch(self, selection: Selection, since: str) -> AsyncIterator[WatchEvent]:
        seen = int(since)
        while True:
            if seen < self.oldest:
                raise Gone("too old resource version")
            for version, resource, event in list(self.log):
                if (
                    version > seen
                    and resource == selection.resource
                    and _fits(event.body, selection)
                ):
                    seen = version
                    yield WatchEvent(event.change, copy.deepcopy(event.body))
            seen = max(seen, self.version)
            self.news.clear()
            await self.news.wait()

    def list(self, selection: Selection) -> list[Object]:
        found = [
            body for (resource, _), body in self.objects.items() if resource == selection.resource
        ]
        return [copy.deepcopy(body) for body in found if _fits(body, selection)]

    def of(self, resource: Resource, name: str, namespace: str = "default") -> Object | None:
        return self.objects.get((resource, ObjectKey(namespace, name)))

    # writing

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False
    ) -> Object:
        name = body["metadata"]["name"]
        call = Call("dry-run" if dry_run else "create", resource, name, body)
        lost = self._begin(call)
        key = ObjectKey(namespace, name)
        self.before_create(call)
        if namespace in self.terminating:
            raise Forbidden(
                f"namespace {namespace} is being terminated", namespace_terminating=True
            )
        if (resource, key) in self.objects:
            raise AlreadyExists(f"{resource.plural} {key} already exists")
        if dry_run:
            return body
        made = copy.deepcopy(body)
        if resource == SECRETS:
            strings = made.pop("stringData", {})
            made["data"] = {
                key: base64.b64encode(value.encode()).decode() for key, value in strings.items()
            }
        metadata = made["metadata"]
        uid = f"uid-{self.version + 1}"
        metadata |= {
            "namespace": namespace,
            "uid": uid,
            "generation": 1,
            "creationTimestamp": self._now(),
        }
        if resource == PODS:
            made["status"] = {"phase": "Pending"}
        self._put(resource, key, made, Change.ADDED)
        return self._answer(made, lost)

    async def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        lost = self._begin(Call("apply", resource, body["metadata"]["name"], body))
        key = ObjectKey(namespace, body["metadata"]["name"])
        old = self._find(resource, key)
        new = copy.deepcopy({**old, **body, "metadata": {**old["metadata"], **body["metadata"]}})
        new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        self._put(resource, key, new, Change.MODIFIED)
        return self._answer(new, lost)

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: dict[str, Any],
        subresource: str = "",
    ) -> Object:
        call = Call(subresource or "patch", resource, name, patch)
        return self._patched(call, namespace, is_status=subresource == "status")

    async def replace(self, resource: Resource, namespace: str, body: Object) -> Object:
        lost = self._begin(Call("update", resource, body["metadata"]["name"], body))
        key = ObjectKey(namespace, body["metadata"]["name"])
        old = self._find(resource, key)
        if old["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
            raise Conflict(f"{key} has changed")
        self._put(resource, key, copy.deepcopy(body), Change.MODIFIED)
        return self._answer(self.objects[resource, key], lost)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
    ) -> Object:
        lost = self._begin(Call("delete", resource, name, uid))
        key = ObjectKey(namespace, name)
        old = self._find(resource, key)
        if old["metadata"]["uid"] != uid:
            raise Conflict(f"{key} has another UID")
        left = self.remove(resource, key, grace_s)
        return self._answer(left or {"kind": "Status", "status": "Success"}, lost)

    # what users, the kubelet and controllers do

    def remove(
        self, resource: Resource, key: ObjectKey, grace_s: int | None = None
    ) -> Object | None:
        """As a deletion by anybody. The object while it is still terminating, else None."""
        old = self.objects[resource, key]
        phase = (old.get("status") or {}).get("phase")
        if resource == PODS and grace_s != 0 and phase == "Running":
            if "deletionTimestamp" not in old["metadata"]:
                left = copy.deepcopy(old)
                left["metadata"]["deletionTimestamp"] = self._now(
                    GRACE_S if grace_s is None else grace_s
                )
                self._put(resource, key, left, Change.MODIFIED)
            return self.objects[resource, key]
        self._drop(resource, key)
        if resource == JOBS:
            self._collect(old["metadata"]["uid"])
        return None

    def edit(
        self,
        resource: Resource,
        key: ObjectKey,
        change: Callable[[Object], None],
        *,
        spec: bool = False,
    ) -> None:
        """A write by another client. `spec` increments the generation."""
        body = copy.deepcopy(self.objects[resource, key])
        change(body)
        if spec:
            body["metadata"]["generation"] += 1
        self._put(resource, key, body, Change.MODIFIED)

    def _collect(self, uid: str) -> None:
        for (resource, key), body in list(self.objects.items()):
            owners = body["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == uid for owner in owners):
                self._drop(resource, key)

    def _patched(self, call: Call, namespace: str, *, is_status: bool) -> Object:
        lost = self._begin(call)
        key = ObjectKey(namespace, call.name)
        old = self._find(call.resource, key)
        wanted = (call.body.get("metadata") or {}).get("resourceVersion")
        if wanted is not None and wanted != old["metadata"]["resourceVersion"]:
            raise Conflict(f"{key} has changed")
        new = copy.deepcopy(old)
        parts = {"status"} if is_status else set(call.body) - {"status"}
        for part in parts & set(call.body):
            new[part] = _merged(new.get(part) or {}, call.body[part])
        self._put(call.resource, key, new, Change.MODIFIED)
        return self._answer(new, lost)

    def _begin(self, call: Call) -> BaseException | None:
        """Raises the fault that is due, or returns the one that is due after the call."""
        fault = self.fault(call)
        if fault is not None and not fault.answer_lost:
            raise fault.error
        self.writes.append(call)
        return fault.error if fault is not None else None

    def _answer(self, body: Object, lost: BaseException | None) -> Object:
        if lost is not None:
            raise lost
        return copy.deepcopy(body)

    def _find(self, resource: Resource, key: ObjectKey) -> Object:
        if (resource, key) not in self.objects:
            raise NotFound(f"{resource.plural} {key} not found")
        return self.objects[resource, key]

    def _put(self, resource: Resource, key: ObjectKey, body: Object, change: Change) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[resource, key] = body
        self._tell(resource, WatchEvent(change, body))

    def _drop(self, resource: Resource, key: ObjectKey) -> None:
        body = copy.deepcopy(self.objects.pop((resource, key)))
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self._tell(resource, WatchEvent(Change.DELETED, body))

    def _tell(self, resource: Resource, event: WatchEvent) -> None:
        self.log.append(
            (self.version, resource, WatchEvent(event.change, copy.deepcopy(event.body)))
        )
        self.news.set()

    def _now(self, later_s: float = 0) -> str:
        return datetime.fromtimestamp(int(self._clock() + later_s), UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )


def _fits(body: Object, selection: Selection) -> bool:
    labels = body["metadata"].get("labels") or {}
    wanted = (
        dict(pair.split("=") for pair in selection.labels.split(",")) if selection.labels else {}
    )
    in_namespace = selection.namespace in (None, body["metadata"].get("namespace"))
    return in_namespace and all(labels.get(key) == value for key, value in wanted.items())


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7396, written apart from the operator's own difference."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
