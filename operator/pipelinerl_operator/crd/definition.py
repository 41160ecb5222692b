"""The CustomResourceDefinition as one object."""

from typing import Any

from pipelinerl_common.settings import API_VERSION, KIND, JobSpec
from pipelinerl_operator.controller.status import JobStatus
from pipelinerl_operator.crd.rules import add_rules
from pipelinerl_operator.crd.schema import structural_schema

PLURAL = "pipelinerljobs"
GROUP, _, VERSION = API_VERSION.partition("/")

# name, type, path below the object, shown only with -o wide
_COLUMNS = (
    ("Phase", "string", ".status.phase", False),
    ("Step", "integer", ".status.training.step", False),
    ("Reward", "number", ".status.training.reward", False),
    ("Lag", "number", ".status.training.lag", False),
    ("Actors", "integer", ".status.actors.ready", False),
    ("Trainers", "integer", ".status.trainers.ready", False),
    ("Restarts", "integer", ".status.restarts", False),
    ("Age", "date", ".metadata.creationTimestamp", False),
    ("Steps", "integer", ".spec.algorithm.steps", True),
    ("ESS", "number", ".status.training.ess", True),
    ("Samples/s", "number", ".status.training.samplesPerSecond", True),
    ("Policy", "string", ".spec.staleness.policy", True),
    ("Epoch", "integer", ".status.weightGroup.epoch", True),
    ("Members", "integer", ".status.weightGroup.numMembers", True),
)


_NAME = {"type": "string", "maxLength": 40, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
"""So that names of pods fit in 63 characters, and because the job's Service, whose name begins with
a letter, is called so.
"""


def crd_definition() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "pipelinerljob",
                "shortNames": ["prl"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": job_schema()},
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.actors.replicas",
                            "statusReplicasPath": ".status.actors.created",
                            "labelSelectorPath": ".status.actorSelector",
                        },
                    },
                }
            ],
        },
    }


def job_schema() -> dict[str, Any]:
    spec, status = structural_schema(JobSpec), structural_schema(JobStatus, with_defaults=False)
    spec["description"] = (
        "What is trained, how, and with which pods. `pipelinerl up` reads the same."
    )
    status["description"] = "What the operator sees and remembers; only it writes here."
    status["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    schema = {
        "description": "A reinforcement-learning run of a language model in which generation never "
        "stops: actors sample, "
        "trainers learn, and new weights reach the generators between two tokens.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": _NAME}},
            "spec": spec,
            "status": status,
        },
    }
    add_rules(schema)
    return schema


def _column(name: str, kind: str, path: str, is_wide: bool) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if is_wide else {})}
