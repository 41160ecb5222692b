"""The Kubernetes API as the operator uses it: a port of ten calls, informers, a work queue, leader
election.
"""

from pipelinerl_operator.kube.api import Api, Change, Page, Selection, WatchEvent
from pipelinerl_operator.kube.client import HttpApi, open_api
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
    "HttpApi",
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
