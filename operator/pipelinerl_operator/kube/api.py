"""The port to the API server: what the operator asks of it, and nothing else. Behind it: HTTP, or a
test.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pipelinerl_operator.kube.resources import Object, Resource

FIELD_MANAGER = "pipelinerl-operator"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a resource. `namespace` None is all of them; `labels` is a label selector."""

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    metadata_only: bool = False
    """Without spec, data and status: enough for objects whose content is known by a hash."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. `resource_version` is that of the whole list, from which a watch goes on."""

    items: list[Object]
    resource_version: str


class Change(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Nothing changed; the object carries only the resource version that the watch has reached."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    change: Change
    body: Object


class Api(Protocol):
    """Every call has a deadline and raises the errors of `kube.errors`."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""

    def pages(self, selection: Selection) -> AsyncIterator[Page]:
        """The objects as they are, consistently; never from a server's stale cache. Raises Gone
        when it takes too long.
        """

    def watch(self, selection: Selection, since: str) -> AsyncIterator[WatchEvent]:
        """Changes after resource version `since` until the server ends the watch, or is silent for
        longer than bookmarks are apart. Raises Gone, or ApiUnavailable when the server does not
        take the watch.
        """

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False
    ) -> Object:
        """Raises AlreadyExists, Invalid, Forbidden."""

    async def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Server-side apply as the one field manager, taking over fields that others hold."""

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: dict[str, Any]
    ) -> Object:
        """JSON merge patch. A resourceVersion in it makes it fail with Conflict when the object has
        changed.
        """

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, patch: dict[str, Any]
    ) -> Object:
        """As `patch`, on the status sub-resource."""

    async def replace(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Raises Conflict when the object's resourceVersion is not the current one."""

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
        foreground: bool = False,
    ) -> Object:
        """Deletes that very object, which is returned as long as it still exists, else a Status.

        Raises NotFound, or Conflict when the name belongs to another UID.
        """
