"""Informers, which keep stores equal to the cluster, and the stores.

```
 list (pages, consistent) -> store -> watch from the list's version -> store
   ^                                 | ended by the server, or silent: resume from the last version
   |                                 | cut off, refused: the same after a delay with jitter
   +------------- 410 Gone ------------+
```
A list is compared with the store, so that events that were missed become changes like any other. A
store holds the newest version of each object, reduced to what is needed, by job.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.kube.client import Api, Change, Selection
from pipelinerl_operator.kube.errors import Gone, TooManyRequests
from pipelinerl_operator.kube.resources import Object, ObjectKey, key_of


class View(Protocol):
    """The part of an object that is kept."""

    @property
    def key(self) -> ObjectKey: ...
    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


MAX_GONE = 4096

V = TypeVar("V", bound=View)


class Store(Generic[V]):
    """Objects of one kind. `view` reduces an object, `job_of` returns the key of its job, with
    which
    `changed` is called.
    """

    def __init__(
        self,
        view: Callable[[Object], V],
        job_of: Callable[[V], ObjectKey],
        changed: Callable[[ObjectKey], None],
    ) -> None:
        self._view = view
        self._job_of = job_of
        self._changed = changed
        self._by_key: dict[ObjectKey, V] = {}
        self._by_job: dict[ObjectKey, tuple[V, ...]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """UIDs of the newest removed objects: the response to a creation may arrive after the event
        of the deletion.
        """

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[V]:
        return iter(self._by_key.values())

    def get(self, key: ObjectKey) -> V | None:
        return self._by_key.get(key)

    def of_job(self, job: ObjectKey) -> tuple[V, ...]:
        return self._by_job.get(job, ())

    def put(self, body: Object) -> None:
        """Takes an object from a list, a watch or the response to a write. The newest version
        stays.
        """
        view = self._view(body)
        if view.uid in self._gone:
            return
        old = self._by_key.get(view.key)
        if (
            old is not None
            and old.uid == view.uid
            and not _is_newer(view.resource_version, old.resource_version)
        ):
            return
        self._drop(view.key)
        self._by_key[view.key] = view
        job = self._job_of(view)
        self._by_job[job] = (*self._by_job.get(job, ()), view)
        self._changed(job)

    def remove(self, key: ObjectKey, uid: str = "") -> None:
        """Removes an object. Without `uid` it is the one that has the name; with `uid` a successor
        of the same name stays, and the object is never stored again.
        """
        if uid:
            self._gone[uid] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
        old = self._by_key.get(key)
        if old is not None and uid in ("", old.uid):
            self._drop(key)
            self._changed(self._job_of(old))

    def keep_only(self, keys: Iterable[ObjectKey], within: str | None, version: str = "") -> None:
        """Removes what a new list of namespace `within` (None: all) of `version` does not contain.

        Objects created after `version` stay: the responses to their creation arrived earlier.
        """
        listed = frozenset(keys)
        for view in [each for each in self if within in (None, each.key.namespace)]:
            if view.key not in listed and not _came_later(view.resource_version, version):
                self.remove(view.key)

    def _drop(self, key: ObjectKey) -> None:
        old = self._by_key.pop(key, None)
        if old is None:
            return
        job = self._job_of(old)
        rest = tuple(view for view in self._by_job[job] if view is not old)
        if rest:
            self._by_job[job] = rest
        else:
            del self._by_job[job]


def _is_newer(version: str, than: str) -> bool:
    """Whether `version` replaces `than`. When the order is unknown, the later arrival counts."""
    return _came_later(version, than) or (version != than and not _came_later(than, version))


def _came_later(version: str, than: str) -> bool:
    """Compares resource versions, which are numbers of one sequence (official since 1.35)."""
    return version.isdigit() and than.isdigit() and int(version) > int(than)


log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MIN_PAUSE_S = 0.1
"""Least pause between two watches that the server ended regularly."""


class Informer(Generic[V]):
    """Keeps `store` equal to a selection. `synced` is set once it holds the first full list."""

    def __init__(self, api: Api, selection: Selection, store: Store[V]) -> None:
        self.selection = selection
        self.store = store
        self.synced = asyncio.Event()
        self.restarts = 0
        """Number of lists and watches that were restarted after a failure."""
        self._api = api
        self._since = ""
        self._heard_at = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the last event, bookmark or accepted watch."""
        return time.monotonic() - self._heard_at

    async def run(self) -> None:
        """Runs until cancelled. Consumes lists and watches, produces changes of the store, waits
        for events and, after failures, for a growing delay.
        """
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            try:
                if not self._since:
                    await self._list()
                await self._watch()
                self._heard_at = time.monotonic()  # accepted, though there may have been no event
                backoff.reset()
                pause_s = MIN_PAUSE_S * random.uniform(0.5, 1.0)
            except PipelineRLError as error:
                log.warning("resource=%s restarts: %s", self.selection.resource.plural, error)
                if isinstance(error, Gone):
                    self._since = ""
                asked_s = error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
                pause_s = max(backoff.next_delay(), asked_s * random.uniform(0.5, 1.0))
                self.restarts += 1
            await asyncio.sleep(pause_s)

    async def _list(self) -> None:
        keys: list[ObjectKey] = []
        version = ""
        async for page in self._api.pages(self.selection):
            self._heard_at = time.monotonic()
            version = page.resource_version
            for body in page.items:
                keys.append(key_of(body))
                self.store.put(body)
            await asyncio.sleep(0)  # a page takes time to process: let other tasks run
        self.store.keep_only(keys, self.selection.namespace, version)
        self._since = version
        self.synced.set()

    async def _watch(self) -> None:
        async for event in self._api.watch(self.selection, self._since):
            self._heard_at = time.monotonic()
            self._since = event.body["metadata"]["resourceVersion"]
            if event.change is Change.DELETED:
                self.store.remove(key_of(event.body), event.body["metadata"]["uid"])
            elif event.change is not Change.BOOKMARK:
                self.store.put(event.body)
