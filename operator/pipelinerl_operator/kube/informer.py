"""What is known of the cluster: the newest seen version of each object, reduced to what is needed,
found by job.

Keeps a store what the cluster is.

```
 list (pages, consistent) -> store -> watch from the list's version -> store
   ^                                   | ended by the server, or silent: watch on from the last version
   |                                   | cut off, refused: the same after a jittered pause
   +------------- 410 Gone ------------+
```
A list is compared with the store: what was missed meanwhile becomes changes like any other.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.kube.api import Api, Change, Selection
from pipelinerl_operator.kube.errors import Gone, TooManyRequests
from pipelinerl_operator.kube.resources import Object, ObjectKey, key_of


class View(Protocol):
    """What of an object is kept."""

    @property
    def key(self) -> ObjectKey: ...
    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


MAX_GONE = 4096

V = TypeVar("V", bound=View)


class Store(Generic[V]):
    """Objects of one kind. `view` reduces an object, `job_of` names the job that it belongs to,
    `changed` hears its key.
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
        """UIDs of the newest removed objects: the answer to a creation may come later than the news
        of the end.
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
        """Takes an object from a list, a watch, or the answer to a write; whichever is newest
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
        """`uid` empty removes whatever has the name; otherwise a successor of the same name stays,
        and that very object never comes back.
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
        """After a new list of namespace `within` (None: all): what it did not hold is gone.

        Not so what was made after `version`, that of the list: the answer to its creation is here
        already.
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
    """Where nothing tells which came later, what is heard later."""
    return _came_later(version, than) or (version != than and not _came_later(than, version))


def _came_later(version: str, than: str) -> bool:
    """Resource versions are numbers of one sequence (official since 1.35, true of every etcd
    before).
    """
    return version.isdigit() and than.isdigit() and int(version) > int(than)


log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MIN_PAUSE_S = 0.1
"""Between watches that the server ended as it should."""


class Informer(Generic[V]):
    """Follows one selection. `synced` is set once the store holds the first full list."""

    def __init__(self, api: Api, selection: Selection, store: Store[V]) -> None:
        self.selection = selection
        self.store = store
        self.synced = asyncio.Event()
        self.restarts = 0
        """Lists and watches begun again after a failure."""
        self._api = api
        self._since = ""
        self._heard_at = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the server was last heard of here: an event, a bookmark, or a watch that it
        took.
        """
        return time.monotonic() - self._heard_at

    async def run(self) -> None:
        """For ever: consumes lists and watches, produces changes of the store."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if not self._since:
                    await self._list()
                await self._watch()
                self._heard_at = (
                    time.monotonic()
                )  # it took the watch, though there may have been nothing to tell
                backoff_s, pause_s = FIRST_BACKOFF_S, MIN_PAUSE_S
            except PipelineRLError as error:
                log.warning("resource=%s follows again: %s", self.selection.resource.plural, error)
                if isinstance(error, Gone):
                    self._since = ""
                pause_s = max(
                    backoff_s, error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
                )
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                self.restarts += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        keys: list[ObjectKey] = []
        version = ""
        async for page in self._api.pages(self.selection):
            self._heard_at = time.monotonic()
            version = page.resource_version
            for body in page.items:
                keys.append(key_of(body))
                self.store.put(body)
            await asyncio.sleep(0)  # a page of 500 objects is work: let the others have their turn
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
