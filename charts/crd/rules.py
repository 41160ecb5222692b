"""Validation rules in CEL (x-kubernetes-validations) by the path of the object that they check.

A server before 1.25 does not have them. The settings check the same, except for comparisons with
the previous object: there the operator reports the difference in the job's status.

A rule cannot look into free-form fields (podTemplate, args, engineArgs), but can compare them as a
whole. The server then compares the number of keys and the values of keys that both have: it does
not notice a renamed key.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL expression and the message when it is false."""

    rule: str
    message: str

    def as_object(self) -> dict[str, str]:
        return {"rule": self.rule, "message": self.message}


Path = tuple[str, ...]
"""Path below the object; "[]" stands for the items of a list."""

_MUTABLE = "; set suspend, or change restart.id together with it"


def _kept(*fields: str) -> str:
    """Expression that none of the fields has changed. They have defaults or are required."""
    return " && ".join(f"self.{field} == oldSelf.{field}" for field in fields)


def _kept_optional(*fields: str) -> str:
    """Like `_kept`, for fields that may be absent."""
    return " && ".join(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == "
        f"oldSelf.{field})"
        for field in fields
    )


def _unless_restarted(condition: str) -> str:
    """Allows a change when all pods are replaced: after a suspension or with a new restart.id."""
    return f"oldSelf.suspend || !({_kept_optional('restart.id')}) || ({condition})"


RULES: dict[Path, tuple[Rule, ...]] = {
    ("spec",): (
        Rule(_kept_optional("managedBy"), "managedBy cannot be changed"),
        Rule(
            _unless_restarted(_kept("seed", "model", "task", "algorithm", "staleness")),
            "seed, model, task, algorithm and staleness cannot be changed while the job "
            f"runs{_MUTABLE}",
        ),
        Rule(
            _unless_restarted(
                _kept(
                    "trainers",
                    "preprocessor",
                    "stream",
                    "weightTransfer",
                    "network",
                    "sharedMemorySize",
                )
            ),
            "trainers, preprocessor, stream, weightTransfer, network and sharedMemorySize cannot "
            "be changed while the job runs" + _MUTABLE,
        ),
        Rule(
            _unless_restarted(
                _kept_optional("reference", "evaluation", "image")
                + " && "
                + _kept("imagePullSecrets", "env")
            ),
            "reference, evaluation, image, imagePullSecrets and env cannot be changed while the "
            f"job runs{_MUTABLE}",
        ),
        Rule(
            _unless_restarted(
                _kept(
                    "actors.generatorsPerReplica",
                    "actors.gpusPerReplica",
                    "actors.generator",
                    "actors.startupTimeoutSeconds",
                    "actors.drainSeconds",
                )
                + " && "
                + _kept_optional("actors.image", "actors.podTemplate")
            ),
            "of actors, only replicas, minReplicas and maxReplicas can be changed while the job "
            f"runs{_MUTABLE}",
        ),
        Rule(
            "self.algorithm.kl.coefficient == 0.0 || has(self.reference)",
            "algorithm.kl.coefficient needs a reference model: add 'reference: {}' or set the "
            "coefficient to 0",
        ),
        Rule(
            "self.algorithm.kl.coefficient > 0.0 || !has(self.reference)",
            "reference is never used with algorithm.kl.coefficient=0: remove it or set the "
            "coefficient",
        ),
        Rule(
            "self.task.sampling.maxTokens < self.model.maxModelLen",
            "task.sampling.maxTokens leaves no room for a prompt in model.maxModelLen",
        ),
        Rule(
            "self.trainers.microBatchTokens >= self.model.maxModelLen",
            "trainers.microBatchTokens cannot hold one trajectory of model.maxModelLen tokens",
        ),
        Rule(
            "self.task.groupSize >= 2 || "
            "(has(self.algorithm.baseline) ? self.algorithm.baseline in ['none', 'value'] : "
            "self.algorithm.loss == 'ppo')",
            "an algorithm.baseline of the group needs task.groupSize of at least 2",
        ),
        Rule(
            "self.weightTransfer.backend != 'nccl' || self.actors.gpusPerReplica > 0",
            "weightTransfer.backend=nccl needs GPUs: set the backend to gloo, or "
            "actors.gpusPerReplica",
        ),
        Rule(
            "!has(self.evaluation) || has(self.trainers.checkpoint.pvc) || "
            "has(self.trainers.checkpoint.uri)",
            "evaluation reads checkpoints from another pod: set trainers.checkpoint.pvc or "
            "trainers.checkpoint.uri",
        ),
        Rule(
            "!has(self.evaluation) || (self.trainers.checkpoint.everySteps > 0 && "
            "self.evaluation.everySteps % self.trainers.checkpoint.everySteps == 0)",
            "evaluation.everySteps must be a multiple of trainers.checkpoint.everySteps, which "
            "must be above 0",
        ),
        Rule(
            "!self.autoscale.enabled || has(self.actors.maxReplicas)",
            "autoscale.enabled needs actors.maxReplicas",
        ),
    ),
    ("spec", "actors"): (
        Rule(
            "self.minReplicas <= self.replicas",
            "minReplicas is more than replicas: lower the one or raise the other",
        ),
        Rule(
            "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            "replicas is more than maxReplicas: lower the one or raise the other",
        ),
        Rule(
            "self.gpusPerReplica == 0 || self.gpusPerReplica == self.generatorsPerReplica * "
            "self.generator.tensorParallelSize",
            "gpusPerReplica must be 0 or generatorsPerReplica times generator.tensorParallelSize",
        ),
    ),
    ("spec", "algorithm"): (
        Rule(
            "self.optimizer.warmupSteps <= self.steps", "optimizer.warmupSteps is more than steps"
        ),
        Rule(
            "!has(self.baseline) || !(self.baseline in ['none', 'value']) || "
            "!(self.loss in ['grpo', 'dapo', 'gspo', 'cispo']) || (has(self.divideByStd) && "
            "!self.divideByStd)",
            "this loss divides by the spread around the group's mean: set baseline=mean, or "
            "divideByStd=false",
        ),
        Rule(
            "self.kl.estimator != 'k1' || self.kl.placement != 'loss'",
            "kl.estimator=k1 teaches nothing in the loss: set kl.placement=reward, or another "
            "estimator",
        ),
    ),
    ("spec", "model", "cache"): (
        Rule("has(self.pvc) != has(self.emptyDir)", "exactly one of pvc and emptyDir"),
    ),
    ("spec", "trainers"): (
        Rule(
            "self.replicas == 1 || has(self.checkpoint.pvc) || has(self.checkpoint.uri)",
            "several trainer nodes write one checkpoint together: set checkpoint.pvc or "
            "checkpoint.uri",
        ),
        Rule(
            "self.processesPerNode % self.sequenceParallelSize == 0",
            "processesPerNode must be a multiple of sequenceParallelSize: change one of them",
        ),
    ),
    ("spec", "trainers", "checkpoint"): (
        Rule("!has(self.pvc) || !has(self.uri)", "pvc and uri exclude each other"),
    ),
    ("spec", "env", "[]"): (
        Rule("!has(self.value) || !has(self.valueFrom)", "value and valueFrom exclude each other"),
        Rule("!self.name.startsWith('PRL_')", "names that begin with PRL_ are set by the operator"),
    ),
    ("spec", "env", "[]", "valueFrom"): (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), "
            "has(self.fieldRef)].exists_one(given, given)",
            "exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    ),
    ("spec", "autoscale"): (
        Rule("self.lowRatio < self.highRatio", "lowRatio must be below highRatio"),
    ),
}


def add_rules(schema: dict[str, Any]) -> None:
    """Adds every rule at its path. Raises KeyError when the path does not exist.

    The server evaluates rules on the default of a section as it is written, without the defaults of
    its fields, and refuses the definition when a rule reads a field that is absent. Therefore the
    fields that rules read are written out in such a default.
    """
    for path, rules in RULES.items():
        section = place(schema, path)
        section["x-kubernetes-validations"] = [rule.as_object() for rule in rules]
        if "default" in section:
            named = {name for rule in rules for name in re.findall(r"\bself\.(\w+)", rule.rule)}
            written_out = _written_out(section["default"], section)
            section["default"] |= {
                name: value for name, value in written_out.items() if name in named
            }


def _written_out(default: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A section's default with the defaults of its fields, recursively."""
    fields = {
        name: each
        for name, each in schema.get("properties", {}).items()
        if name in default or "default" in each
    }
    return default | {
        name: _written_out(value, each)
        if isinstance(value := default.get(name, each.get("default")), dict)
        else value
        for name, each in fields.items()
    }


def place(schema: dict[str, Any], path: Path) -> dict[str, Any]:
    """The part of the schema at a path."""
    for part in path:
        schema = schema["items"] if part == "[]" else schema["properties"][part]
    return schema
