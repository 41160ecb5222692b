"""The Kubernetes API as the operator uses it: ten calls, informers, a work queue, leader election.

Written by hand after a look at the libraries (December 2026). kubernetes_asyncio 36 has leader
election and a dynamic client with server-side apply, but no informer, store or work queue. kr8s
0.20 and lightkube 1.0 have neither informers nor election. kopf has all of it, but owns the event
loop and the retries, which here belong to the work queue. None offers watches of metadata only,
objects as plain dicts (decoding into models takes twenty times as long) and a bounded memory at
1000 jobs. Of the official client only the reader of kubeconfig files is used.
"""

from pipelinerl_operator.kube.client import (
    Api,
    Change,
    Page,
    Selection,
    WatchEvent,
    open_api,
)
from pipelinerl_operator.kube.connection import ApiConnection, find_connection
from pipelinerl_operator.kube.election import Election, LeaseTimes
from pipelinerl_operator.kube.informer import Informer, Store, View
from pipelinerl_operator.kube.resources import Object, ObjectKey, Resource
from pipelinerl_operator.kube.workqueue import WorkQueue

__all__ = [
    "Api",
    "ApiConnection",
    "Change",
    "Election",
    "Informer",
    "LeaseTimes",
    "Object",
    "ObjectKey",
    "Page",
    "Resource",
    "Selection",
    "Store",
    "View",
    "WatchEvent",
    "WorkQueue",
    "find_connection",
    "open_api",
]
