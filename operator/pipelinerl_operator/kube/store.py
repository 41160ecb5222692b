"""What is known of the cluster: the newest seen version of each object, reduced to what is needed,
found by job.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from pipelinerl_operator.kube.resources import Object, ObjectKey


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
