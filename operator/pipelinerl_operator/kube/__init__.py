"""The Kubernetes API as the operator uses it: a port of ten calls, informers, a work queue, leader
election.
"""

from pipelinerl_operator.kube.api import Api, Change, Page, Selection, WatchEvent
from pipelinerl_operator.kube.client import HttpApi, open_api
from pipelinerl_operator.kube.connection import Connection, connection
from pipelinerl_operator.kube.informer import Informer
from pipelinerl_operator.kube.leader import Election, LeaseTimes
from pipelinerl_operator.kube.resources import Key, Object, Resource
from pipelinerl_operator.kube.store import Store, View
from pipelinerl_operator.kube.workqueue import WorkQueue

__all__ = [
    "Api",
    "Change",
    "Connection",
    "Election",
    "HttpApi",
    "Informer",
    "Key",
    "LeaseTimes",
    "Object",
    "Page",
    "Resource",
    "Selection",
    "Store",
    "View",
    "WatchEvent",
    "WorkQueue",
    "connection",
    "open_api",
]
