"""Keeps a store what the cluster is.

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
from typing import Generic

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.kube.api import Api, Change, Selection
from pipelinerl_operator.kube.errors import Gone, TooManyRequests
from pipelinerl_operator.kube.resources import ObjectKey, key_of
from pipelinerl_operator.kube.store import Store, V

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
