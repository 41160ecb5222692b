"""What is known of the cluster, whatever order the news comes in."""

from pipelinerl_operator.controller.views import PodView
from pipelinerl_operator.kube import Object, ObjectKey, Store

JOB = ObjectKey("team", "sums")


def pod(uid: str, version: int, name: str = "sums-actor-0") -> Object:
    labels = {"pipelinerl.dev/job": "sums"}
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": metadata, "status": {"phase": "Pending"}}


def make_store() -> tuple[Store[PodView], list[ObjectKey]]:
    changed: list[ObjectKey] = []
    return Store[PodView](
        PodView.of, lambda view: ObjectKey(view.key.namespace, view.job), changed.append
    ), changed


def uids(store: Store[PodView]) -> list[str]:
    return [view.uid for view in store.of_job(JOB)]


def test_the_newest_version_stays_whatever_comes_last() -> None:
    store, changed = make_store()
    store.put(pod("a", 9))
    store.put(pod("a", 10))
    store.put(pod("a", 9))  # 9 < 10 as numbers, not as text
    assert [view.resource_version for view in store.of_job(JOB)] == ["10"]
    assert changed == [JOB, JOB]


def test_a_creation_that_is_answered_after_the_end_leaves_no_ghost() -> None:
    store, _ = make_store()
    store.put(pod("a", 10))
    store.remove(ObjectKey("team", "sums-actor-0"), "a")  # the watch was faster than the answer
    store.put(pod("a", 10))
    assert uids(store) == []
    store.remove(ObjectKey("team", "sums-actor-1"), "b")  # so fast that it was never seen
    store.put(pod("b", 11, "sums-actor-1"))
    assert uids(store) == []
    store.put(pod("c", 12))
    assert uids(store) == ["c"]


def test_a_successor_stays_when_its_predecessor_goes() -> None:
    store, _ = make_store()
    store.put(pod("a", 10))
    store.put(pod("b", 12))
    store.remove(ObjectKey("team", "sums-actor-0"), "a")
    assert uids(store) == ["b"]


def test_what_a_list_does_not_hold_is_gone_until_the_watch_tells_of_it() -> None:
    store, _ = make_store()
    store.put(pod("a", 10))  # made while the list was being read
    store.keep_only([], "team")
    assert uids(store) == []
    store.put(pod("a", 10))
    assert uids(store) == ["a"]


def test_what_was_made_after_a_list_was_read_stays() -> None:
    store, _ = make_store()
    store.put(pod("a", 10))
    store.put(pod("b", 12, "sums-actor-1"))
    store.keep_only([], "team", "11")
    assert uids(store) == ["b"]
