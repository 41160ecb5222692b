"""The interface to the API server: what the operator asks of it. Implemented over HTTP, and in
tests.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pipelinerl_operator.kube.resources import Object, Resource

FIELD_MANAGER = "pipelinerl-operator"


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


class Api(Protocol):
    """Calls to the API server. Each has a deadline and raises the errors of `kube.errors`."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""

    def pages(self, selection: Selection) -> AsyncIterator[Page]:
        """The objects as one consistent list, never from a stale cache. Raises Gone when it takes
        too long.
        """

    def watch(self, selection: Selection, since: str) -> AsyncIterator[WatchEvent]:
        """Changes after version `since` until the server ends the watch or is silent for longer
        than the interval of bookmarks. Raises Gone, or ApiUnavailable for a watch that is not
        accepted.
        """

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False
    ) -> Object:
        """Raises AlreadyExists, Invalid, Forbidden."""

    async def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Server-side apply as the only field manager, which takes over fields of others."""

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: dict[str, Any]
    ) -> Object:
        """JSON merge patch. Raises Conflict when its resourceVersion, if any, is not current."""

    async def patch_status(
        self, resource: Resource, namespace: str, name: str, patch: dict[str, Any]
    ) -> Object:
        """Like `patch`, on the status sub-resource."""

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
        """Deletes the object with that UID. Returns it while it still exists, else a Status.

        Raises NotFound, or Conflict when the name belongs to another UID.
        """
