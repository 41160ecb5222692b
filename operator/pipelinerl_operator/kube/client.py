"""The API over HTTP, with plain dicts: decoding into the official client's types takes twenty times
as long.
"""

import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from pipelinerl_operator.kube.connection import ApiConnection
from pipelinerl_operator.kube.errors import ApiUnavailable, Gone, error_of
from pipelinerl_operator.kube.resources import Object, Resource

FIELD_MANAGER = "pipelinerl-operator"
CONNECT_S = 10.0
CALL_S = 30.0
LIST_S = 60.0
SILENCE_S = 75.0
"""Silence after which a watch is restarted, which shows whether the server is still there. A
current server sends a bookmark about every minute, one of 1.20 none for kinds that do not change.
"""
WATCH_S = (240, 300)
"""Range of the random time after which the server ends a watch, so that they do not restart
together.
"""
PAGE_ITEMS = 100
"""Objects per page: a pod takes 10 kB in the response and five times that once it is parsed."""
MAX_CALLS = 4
"""Concurrent calls besides the watches; more calls wait. Each connection costs memory."""
MAX_EVENT_BYTES = 2 << 20
"""Longest event: etcd accepts objects of 1.5 MB."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects objects of a resource. `namespace` None is all; `labels` is a label selector."""

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    metadata_only: bool = False
    """Leaves out spec, data and status, for objects whose content is known by a hash."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list, with the version of the whole list, from which a watch continues."""

    items: list[Object]
    resource_version: str


class Change(StrEnum):
    """Kinds of watch events."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """No change; the object has only the resource version that the watch has reached."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of an object."""

    change: Change
    body: Object


Observe = Callable[[str, int, float], None]
"""Called for every call with verb, HTTP status (0 without a response) and seconds."""

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Api:
    """Calls to the API server, over one pool of connections for calls and one for watches.

    Made by `open_api`. Each call has a deadline and raises the errors of `kube.errors`.
    """

    def __init__(
        self,
        calls: aiohttp.ClientSession,
        watches: aiohttp.ClientSession,
        connection: ApiConnection,
        observe: Observe,
    ) -> None:
        self._calls = calls
        self._watches = watches
        self._connection = connection
        self._observe = observe

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""
        return await self._call("get", "GET", resource.path(namespace, name))

    async def api_versions(self) -> frozenset[str]:
        """API groups with versions that the server offers, for example "policy/v1"."""
        groups = (await self._call("get", "GET", "/apis")).get("groups") or ()
        return frozenset(
            version["groupVersion"] for group in groups for version in group["versions"]
        )

    async def server_version(self) -> tuple[int, int]:
        """Version of the server, for example (1, 20)."""
        version = await self._call("get", "GET", "/version")
        return int(version["major"]), int("".join(filter(str.isdigit, version["minor"])))

    async def pages(self, selection: Selection) -> AsyncIterator[Page]:
        """The objects as one consistent list, never from a stale cache. Raises Gone when it takes
        too long.
        """
        query = {"limit": str(PAGE_ITEMS), **_labels(selection)}
        path = selection.resource.path(selection.namespace)
        headers = {"Accept": _METADATA_LIST} if selection.metadata_only else {}
        while True:
            body = await self._call(
                "list", "GET", path, query=query, headers=headers, timeout_s=LIST_S
            )
            metadata = body.get("metadata") or {}
            yield Page(body.get("items") or [], metadata.get("resourceVersion", ""))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def watch(self, selection: Selection, since: str) -> AsyncIterator[WatchEvent]:
        """Changes after version `since` until the server ends the watch or is silent for longer
        than the interval of bookmarks. Raises Gone, or ApiUnavailable for a watch that is not
        accepted.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(random.randint(*WATCH_S)),
            **_labels(selection),
        }
        headers = {"Accept": _METADATA} if selection.metadata_only else {}
        path = selection.resource.path(selection.namespace)
        timeout = aiohttp.ClientTimeout(
            total=WATCH_S[1] + SILENCE_S, sock_connect=CONNECT_S, sock_read=SILENCE_S
        )
        async with self._request(
            "watch", "GET", path, query=query, headers=headers, timeout=timeout
        ) as response:
            try:
                async for line in _lines(response.content):
                    yield _event(line)
            except aiohttp.SocketTimeoutError:
                return  # silent for too long: the informer starts another watch
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise ApiUnavailable(f"watch {path}: {type(error).__name__}: {error}") from error

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False
    ) -> Object:
        """Raises AlreadyExists, Invalid, Forbidden."""
        query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        return await self._call("create", "POST", resource.path(namespace), query=query, body=body)

    async def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Server-side apply as the only field manager, which takes over fields of others."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._call(
            "apply", "PATCH", path, query=query, body=body, headers={"Content-Type": APPLY_PATCH}
        )

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: dict[str, Any],
        subresource: str = "",
    ) -> Object:
        """JSON merge patch of the object or its "status". Raises Conflict when the patch has a
        resourceVersion that is not current.
        """
        path, query = resource.path(namespace, name, subresource), {"fieldManager": FIELD_MANAGER}
        headers = {"Content-Type": MERGE_PATCH}
        return await self._call("patch", "PATCH", path, query=query, body=patch, headers=headers)

    async def replace(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Raises Conflict when the object's resourceVersion is not the current one."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._call(
            "update", "PUT", path, query={"fieldManager": FIELD_MANAGER}, body=body
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
    ) -> Object:
        """Deletes the object with that UID. Returns it while it still exists, else a Status.

        Raises NotFound, or Conflict when the name belongs to another UID.
        """
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        return await self._call("delete", "DELETE", resource.path(namespace, name), body=options)

    async def _call(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = CALL_S,
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        async with self._request(
            verb, method, path, query=query, body=body, headers=headers, timeout=timeout
        ) as response:
            answer: Object = json.loads(await response.read())
            return answer

    @asynccontextmanager
    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        all_headers = {
            "Accept": "application/json",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        if (authorization := self._connection.authorization()) is not None:
            all_headers["Authorization"] = authorization
        started, status = time.monotonic(), 0
        # Watches have a pool of their own: they last, and would take every connection of the calls.
        try:
            async with (self._watches if verb == "watch" else self._calls).request(
                method,
                self._connection.server + path,
                params=query,
                data=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
                headers=all_headers,
                ssl=self._connection.tls(),
                timeout=timeout,
            ) as response:
                status = response.status
                try:
                    await _check(response, f"{verb} {path}")
                    yield response
                finally:
                    _cut(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiUnavailable(f"{verb} {path}: {type(error).__name__}: {error}") from error
        finally:
            self._observe(verb, status, time.monotonic() - started)


@asynccontextmanager
async def open_api(
    connection: ApiConnection,
    observe: Observe = lambda verb, code, seconds: None,
    *,
    max_calls: int = MAX_CALLS,
) -> AsyncIterator[Api]:
    """Opens the API behind `connection` until the block is left."""
    for_calls = aiohttp.TCPConnector(limit=max_calls, keepalive_timeout=15)
    for_watches = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
    async with (
        aiohttp.ClientSession(connector=for_calls) as calls,
        aiohttp.ClientSession(connector=for_watches) as watches,
    ):
        yield Api(calls, watches, connection, observe)


async def _check(response: aiohttp.ClientResponse, request: str) -> None:
    if response.status >= 400:
        retry_after = response.headers.get("Retry-After")
        raise error_of(request, response.status, await response.read(), retry_after)


def _cut(response: aiohttp.ClientResponse) -> None:
    """Aborts the connection of a response that is not read to its end, as that of a watch.

    If it were closed, it would wait up to 30 s for the end of TLS. By then the event loop may have
    ended, and the socket would stay open.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()


def _labels(selection: Selection) -> dict[str, str]:
    return {"labelSelector": selection.labels} if selection.labels else {}


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Reads lines in small pieces: every watch that lags would fill a buffer for the largest event.

    Raises ValueError for a line over MAX_EVENT_BYTES.
    """
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
    if rest.strip():
        yield rest


def _event(line: bytes) -> WatchEvent:
    """Parses one line of a watch. Raises Gone or ApiUnavailable for an error that it contains."""
    event = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        if status.get("code") == 410:
            raise Gone(f"watch: {status.get('message')}")
        raise ApiUnavailable(f"watch: {status.get('message')}")
    return WatchEvent(Change(event["type"]), event["object"])
