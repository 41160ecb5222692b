"""The CRD: its form and size, its rules against good and bad objects, and that the chart's copy is
the newest.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml
from celpy import celtypes
from celpy.adapter import json_to_cel
from operator_fakes import make_raw
from pydantic import BaseModel, JsonValue

from crd.definition import crd_definition, job_schema, render_template
from crd.rules import RULES, place
from crd.rules import Path as RulePath
from crd.schema import structural_schema
from pipelinerl_common.errors import SettingsError
from pipelinerl_operator.objects import JobResource

CHECKOUT = Path(__file__).parents[2]
JOBS = sorted((CHECKOUT / "e2e" / "jobs").glob("*.yaml"))
LIMIT_BYTES = 120_000
"""Far below the size of a request, 1.5 MB, and of an object in etcd."""
PRESERVE = "x-kubernetes-preserve-unknown-fields"


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from schemas(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schemas(schema[name], f"{path}.{name}")


def test_the_charts_crd_is_the_one_of_the_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crd", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_check_says_when_the_charts_crd_is_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "crd",
            "--check",
            "--output",
            tmp_path / "crd.yaml",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "is out of date: run charts/crd/generate" in done.stderr


def test_the_crd_is_small() -> None:
    assert len(render_template().encode()) < LIMIT_BYTES


def test_the_definition_is_valid_by_the_newest_schema() -> None:
    kubernetes_validate.validate(
        crd_definition(), kubernetes_validate.latest_version(), strict=True
    )


def test_every_schema_is_structural_and_bounded() -> None:
    for path, schema in schemas(job_schema()):
        assert not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "not", "nullable"}, path
        assert schema.get("type") or schema.get(PRESERVE), path
        if (
            schema.get("type") == "string"
            and "enum" not in schema
            and path not in (".apiVersion", ".kind")
        ):
            assert "maxLength" in schema, path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path
            assert "properties" not in schema, path


def test_patterns_mean_the_same_to_the_api_server() -> None:
    """It has Go's regular expressions: no look-around, no back-references."""
    for path, schema in schemas(job_schema()):
        assert not re.search(r"\(\?[=!<]|\\[1-9]", schema.get("pattern", "")), path


def test_what_is_said_in_the_settings_is_what_explain_shows() -> None:
    spec = job_schema()["properties"]["spec"]["properties"]
    assert spec["actors"]["description"].startswith("The actors: rollout loops")
    assert spec["suspend"] == {
        "description": "Deletes the job's pods and keeps everything else; when turned off again, "
        "training resumes from the newest checkpoint.",
        "type": "boolean",
        "default": False,
    }
    assert spec["stream"]["properties"]["replicas"]["enum"] == [1, 3, 5]
    assert spec["actors"]["properties"]["podTemplate"][PRESERVE] is True
    assert "default" not in spec["managedBy"]


def test_every_field_of_the_spec_says_what_it_is() -> None:
    silent = [
        path
        for path, schema in schemas(job_schema()["properties"]["spec"])
        if path and "description" not in schema
    ]
    silent = [path for path in silent if not path.endswith((".items", ".additionalProperties"))]
    assert silent == []


def test_status_has_no_defaults_and_conditions_merge_by_type() -> None:
    status = job_schema()["properties"]["status"]
    assert not [path for path, schema in schemas(status) if "default" in schema]
    assert status["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_columns_and_scale_point_at_fields_that_exist() -> None:
    version = crd_definition()["spec"]["versions"][0]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    for path in [*paths, *version["subresources"]["scale"].values()]:
        if not path.startswith(".metadata"):
            place(version["schema"]["openAPIV3Schema"], tuple(path.strip(".").split(".")))


def test_defaults_have_the_type_of_their_field() -> None:
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    for path, schema in schemas(job_schema()):
        if "default" in schema:
            assert isinstance(schema["default"], kinds[schema["type"]]), path


@pytest.mark.parametrize("path", [path for path in RULES if path], ids=".".join)
def test_rules_can_be_tried_on_the_defaults_as_they_are_written(path: RulePath) -> None:
    """The server does so before it takes the definition, without the defaults of the fields in a
    default.
    """
    for depth in range(1, len(path) + 1):
        section = place(SCHEMA, path[:depth])
        if "default" in section:
            for value, at in found(section["default"], section, path[depth:]):
                for rule in RULES[path]:
                    both = {"self": to_cel(value, at), "oldSelf": to_cel(value, at)}
                    assert PROGRAMS[rule.rule].evaluate(both), rule.rule


def test_a_default_that_is_written_out_says_what_the_fields_say() -> None:
    actors = place(SCHEMA, ("spec", "actors"))["default"]
    assert actors.pop("generator")["tensorParallelSize"] == 1
    assert actors == {
        "replicas": 1,
        "minReplicas": 1,
        "gpusPerReplica": 0,
        "generatorsPerReplica": 1,
    }
    for name in ("actors", "algorithm", "autoscale", "trainers"):
        section = place(SCHEMA, ("spec", name))
        assert with_defaults(section["default"], section) == with_defaults({}, section), name


class _Odd(BaseModel):
    either: int | str


class _Mixed(BaseModel):
    pair: tuple[int, str]


class _Free(BaseModel):
    anything: list[JsonValue]


@pytest.mark.parametrize("model", [_Odd, _Mixed])
def test_a_type_without_structural_form_is_named(model: type[BaseModel]) -> None:
    with pytest.raises(
        ValueError, match=rf"{model.__name__}\.(either|pair): .* no structural form"
    ):
        structural_schema(model)


def test_free_form_items_are_preserved() -> None:
    assert structural_schema(_Free)["properties"]["anything"]["items"] == {PRESERVE: True}


# The template


def test_braces_in_descriptions_survive_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "crd.definition.crd_definition",
        lambda: {"metadata": {}, "description": "{{ .Values.x }} and {a: 1}"},
    )
    assert "description: '{{ \"{{\" }} .Values.x }} and {a: 1}'" in render_template()


def test_rules_are_left_out_for_servers_that_do_not_know_them() -> None:
    lines = render_template().splitlines()
    kept, inside = [], False
    for line in lines[2:-1]:
        if line.startswith("{{-"):
            inside = "semverCompare" in line
        elif not inside:
            kept.append(line)
    plain = yaml.safe_load("\n".join(kept))
    assert "x-kubernetes-validations" not in json.dumps(plain)
    everything = yaml.safe_load(
        "\n".join(line for line in lines[2:-1] if not line.startswith("{{-"))
    )
    assert everything["spec"] == crd_definition()["spec"]
    assert everything["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


# The rules, in CEL


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server fills an object in."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = with_defaults(filled[name], child)
        return filled
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


class FreeForm(celtypes.MapType):
    """An object with unknown fields as the API server compares it: of these, only ones that both
    have can differ.
    """

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, celtypes.MapType)
        return len(self) == len(other) and all(
            value == other[name] for name, value in self.items() if name in other
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def to_cel(value: Any, schema: dict[str, Any]) -> Any:
    """Typed as the API server types it: a number is a double even where it is written as a whole
    one.
    """
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        shown = {
            name: to_cel(item, fields[name]) if name in fields else json_to_cel(item)
            for name, item in value.items()
        }
        kind = FreeForm if schema.get(PRESERVE) else celtypes.MapType
        return kind({celtypes.StringType(name): item for name, item in shown.items()})
    if isinstance(value, list):
        return celtypes.ListType([to_cel(item, schema["items"]) for item in value])
    if schema.get("type") == "number":
        return celtypes.DoubleType(value)
    return json_to_cel(value)


def found(
    value: Any, schema: dict[str, Any], path: RulePath
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a rule looks at: the values at `path`, none where it is absent."""
    if not path:
        yield value, schema
        return
    part, *rest = path
    if part == "[]":
        for item in value:
            yield from found(item, schema["items"], tuple(rest))
    elif part in value:
        yield from found(value[part], schema["properties"][part], tuple(rest))


SCHEMA = job_schema()
ENVIRONMENT = celpy.Environment()
PROGRAMS = {
    rule.rule: ENVIRONMENT.program(ENVIRONMENT.compile(rule.rule))
    for rules in RULES.values()
    for rule in rules
}


def refusals(new: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """Messages of the rules that refuse `new`, created or, with `old`, updated."""
    new, old = with_defaults(new, SCHEMA), with_defaults(old, SCHEMA) if old else None
    messages = []
    for path, rules in RULES.items():
        before = [to_cel(*each) for each in found(old, SCHEMA, path)] if old else []
        for number, (value, at) in enumerate(found(new, SCHEMA, path)):
            for rule in rules:
                values = {"self": to_cel(value, at)}
                if "oldSelf" in rule.rule:
                    if number >= len(before):
                        continue
                    values["oldSelf"] = before[number]
                if not PROGRAMS[rule.rule].evaluate(values):
                    messages.append(rule.message)
    return messages


EVALUATION = {"everySteps": 100, "sets": [{"name": "held-out", "path": "a:B"}]}
GPUS = {"actors": {"gpusPerReplica": 1}, "weightTransfer": {}}

GOOD: dict[str, dict[str, Any]] = {
    "smallest": {},
    "elastic": {"actors": {"replicas": 3, "minReplicas": 2, "maxReplicas": 3}},
    "reference": {"reference": {}, "algorithm": {"kl": {"coefficient": 1}}},
    "ppo for single trajectories": {
        "task": {"path": "a:B", "groupSize": 1},
        "algorithm": {"loss": "ppo"},
    },
    "a value head for grpo": {
        "algorithm": {"loss": "grpo", "baseline": "value", "divideByStd": False}
    },
    "gpus": GPUS,
    "claim": {"model": {"uri": "hf://a/b", "cache": {"pvc": "models"}}},
    "folder": {"model": {"uri": "hf://a/b", "cache": {"emptyDir": {}}}},
    "nodes": {"trainers": {"replicas": 2, "checkpoint": {"pvc": "checkpoints"}}},
    "shared rows": {"trainers": {"processesPerNode": 4, "sequenceParallelSize": 2}},
    "shared folder": {"trainers": {"replicas": 2, "checkpoint": {"uri": "file:///mnt/shared"}}},
    "env": {
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C"},
        ]
    },
    "autoscale": {"autoscale": {"enabled": True}, "actors": {"maxReplicas": 4}},
    "evaluation": {
        "evaluation": EVALUATION,
        "trainers": {"checkpoint": {"pvc": "checkpoints", "everySteps": 10}},
    },
    "rdma": {"network": {"rdma": {"resourceName": "rdma/hca", "ipcLock": True}}},
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too many at least": (
        {"actors": {"replicas": 1, "minReplicas": 2}},
        "minReplicas is more than replicas",
    ),
    "fewer GPUs than workers": (
        {"actors": {"gpusPerReplica": 1, "generator": {"tensorParallelSize": 2}}},
        "gpusPerReplica must be 0 or generatorsPerReplica times",
    ),
    "GPUs that no worker uses": (
        {"actors": {"gpusPerReplica": 4, "generatorsPerReplica": 3}},
        "gpusPerReplica must be 0 or generatorsPerReplica times",
    ),
    "beyond the most": (
        {"actors": {"replicas": 3, "maxReplicas": 2}},
        "replicas is more than maxReplicas",
    ),
    "no reference": ({"algorithm": {"kl": {"coefficient": 0.1}}}, "needs a reference model"),
    "idle reference": ({"reference": {}}, "reference is never used"),
    "no room": (
        {
            "task": {"path": "a:B", "sampling": {"maxTokens": 64}},
            "model": {"uri": "a", "maxModelLen": 64},
        },
        "no room for a prompt",
    ),
    "small micro-batch": ({"trainers": {"microBatchTokens": 8}}, "cannot hold one trajectory"),
    "group of one": ({"task": {"path": "a:B", "groupSize": 1}}, "groupSize of at least 2"),
    "nccl on a cpu": ({"weightTransfer": {}}, "backend=nccl needs GPUs"),
    "unbounded scaling": (
        {"autoscale": {"enabled": True}},
        "autoscale.enabled needs actors.maxReplicas",
    ),
    "long warm-up": (
        {"algorithm": {"steps": 5, "optimizer": {"warmupSteps": 6}}},
        "warmupSteps is more than steps",
    ),
    "grpo with a value head": (
        {"algorithm": {"loss": "grpo", "baseline": "value"}},
        "set baseline=mean, or divideByStd=false",
    ),
    "mean of a group of one": (
        {"task": {"path": "a:B", "groupSize": 1}, "algorithm": {"loss": "grpo"}},
        "groupSize of at least 2",
    ),
    "k1 in the loss": (
        {"reference": {}, "algorithm": {"kl": {"coefficient": 1, "estimator": "k1"}}},
        "set kl.placement=reward",
    ),
    "two caches": (
        {"model": {"uri": "a", "cache": {"pvc": "a", "emptyDir": {}}}},
        "exactly one of pvc and emptyDir",
    ),
    "no cache": ({"model": {"uri": "a", "cache": {}}}, "exactly one of pvc and emptyDir"),
    "two places": (
        {"trainers": {"checkpoint": {"pvc": "a", "uri": "file:///a"}}},
        "pvc and uri exclude each other",
    ),
    "nodes apart": ({"trainers": {"replicas": 2}}, "several trainer nodes write one checkpoint"),
    "shared rows over nodes": (
        {"trainers": {"processesPerNode": 2, "sequenceParallelSize": 4}},
        "processesPerNode must be a multiple of sequenceParallelSize",
    ),
    "two values": (
        {
            "env": [
                {
                    "name": "A",
                    "value": "1",
                    "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}},
                }
            ]
        },
        "value and valueFrom exclude each other",
    ),
    "no source": ({"env": [{"name": "A", "valueFrom": {}}]}, "exactly one of secretKeyRef"),
    "two sources": (
        {
            "env": [
                {
                    "name": "A",
                    "valueFrom": {
                        "fieldRef": {"fieldPath": "a"},
                        "secretKeyRef": {"name": "s", "key": "k"},
                    },
                }
            ]
        },
        "exactly one of secretKeyRef",
    ),
    "reserved variable": ({"env": [{"name": "PRL_JOB", "value": "x"}]}, "begin with PRL_"),
    "evaluation without a claim": (
        {"evaluation": EVALUATION},
        "evaluation reads checkpoints from another pod",
    ),
    "evaluation between checkpoints": (
        {"evaluation": EVALUATION, "trainers": {"checkpoint": {"pvc": "a", "everySteps": 7}}},
        "must be a multiple of trainers.checkpoint.everySteps",
    ),
    "evaluation without checkpoints": (
        {"evaluation": EVALUATION, "trainers": {"checkpoint": {"pvc": "a", "everySteps": 0}}},
        "must be a multiple of trainers.checkpoint.everySteps",
    ),
    "ratios": (
        {"autoscale": {"lowRatio": 0.95, "highRatio": 0.9}},
        "lowRatio must be below highRatio",
    ),
}


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_good_jobs_pass_the_rules_and_the_settings(spec: dict[str, Any]) -> None:
    raw = make_raw(**spec)
    assert refusals(raw) == []
    JobResource.parse(raw)


@pytest.mark.parametrize(("spec", "says"), BAD.values(), ids=BAD)
def test_bad_jobs_are_refused_by_the_rules_and_by_the_settings(
    spec: dict[str, Any], says: str
) -> None:
    """Both, because an old server knows no rules."""
    raw = make_raw(**spec)
    assert any(says in message for message in refusals(raw)), refusals(raw)
    with pytest.raises(SettingsError):
        JobResource.parse(raw)


@pytest.mark.parametrize("name", ["a" * 41, "7sums", "sums.two", "sums-"])
def test_bad_names_are_refused_by_the_schema_and_by_the_settings(name: str) -> None:
    schema = job_schema()["properties"]["metadata"]["properties"]["name"]
    assert len(name) > schema["maxLength"] or not re.search(schema["pattern"], name)
    with pytest.raises(SettingsError, match=r"metadata\.name"):
        JobResource.parse(make_raw(name))


MUTABLE: dict[str, dict[str, Any]] = {
    "suspend": {"suspend": True},
    "scale": {"actors": {"replicas": 2, "maxReplicas": 4}},
    "restart": {"restart": {"id": "again"}},
    "life": {
        "ttlSecondsAfterFinished": 60,
        "failurePolicy": {"maxRestarts": 3},
        "cleanPodPolicy": "None",
    },
    "autoscale": {"autoscale": {"enabled": True}, "actors": {"maxReplicas": 4}},
}
IMMUTABLE: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "model": {"model": {"uri": "hf://other/model"}},
    "optimizer": {"algorithm": {"optimizer": {"learningRate": 0.1}}},
    "staleness": {"staleness": {"policy": "conventional"}},
    "image": {"image": "mine:2"},
    "env": {"env": [{"name": "A", "value": "1"}]},
    "reference": {"reference": {}, "algorithm": {"kl": {"coefficient": 0.1}}},
    "evaluation": {"evaluation": EVALUATION, "trainers": {"checkpoint": {"pvc": "a"}}},
    "trainers": {"trainers": {"zeroStage": 2}},
    "actors": {"actors": {"generatorsPerReplica": 2}},
    "actors' image": {"actors": {"image": "mine:2"}},
    "shared memory": {"sharedMemorySize": "0"},
}


@pytest.mark.parametrize("change", MUTABLE.values(), ids=MUTABLE)
def test_a_running_job_can_be_changed_where_it_takes_no_restart(change: dict[str, Any]) -> None:
    assert refusals(make_raw(**change), make_raw()) == []


@pytest.mark.parametrize("change", IMMUTABLE.values(), ids=IMMUTABLE)
def test_the_rest_of_a_job_changes_only_while_suspended_or_with_a_restart(
    change: dict[str, Any],
) -> None:
    assert any(
        "cannot be changed while the job runs" in message or "can be changed" in message
        for message in refusals(make_raw(**change), make_raw())
    )
    assert refusals(make_raw(**change, suspend=False), make_raw(suspend=True)) == []
    assert refusals(make_raw(**change, restart={"id": "2"}), make_raw(restart={"id": "1"})) == []
    assert refusals(make_raw(**change, restart={"id": "2"}), make_raw()) == []


def test_what_was_set_cannot_be_taken_away_while_the_job_runs() -> None:
    assert refusals(make_raw(), make_raw(image="mine:1")) != []
    assert refusals(make_raw(), make_raw(actors={"image": "mine:1"})) != []


def test_the_manager_never_changes() -> None:
    kueue = {"managedBy": "kueue.x-k8s.io/multikueue"}
    for old, new in (({}, kueue), (kueue, {}), (kueue, {"managedBy": "x"})):
        assert "managedBy cannot be changed" in refusals(
            make_raw(**new, suspend=True), make_raw(**old, suspend=True)
        )
    assert refusals(make_raw(**kueue), make_raw(**kueue)) == []


def test_rules_look_into_no_free_form() -> None:
    """It has no fields for CEL: a rule that names one makes the server refuse the CRD. As a whole
    it can be compared.
    """
    schema = job_schema()
    free = {
        path.rpartition(".")[2]
        for path, each in schemas(schema)
        if each.get(PRESERVE) and not each.get("properties")
    }
    assert {"podTemplate", "args", "engineArgs"} <= free
    for rules in RULES.values():
        for rule in rules:
            assert not set(re.findall(r"\.(\w+)(?=\.\w)", rule.rule)) & free, rule.rule


FREE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "task": (
        {"task": {"path": "a:B", "args": {"digits": 1}}},
        {"task": {"path": "a:B", "args": {"digits": 2}}},
    ),
    "engine": (
        {"actors": {"generator": {"engineArgs": {"a": 1}}}},
        {"actors": {"generator": {"engineArgs": {"a": 1, "b": 1}}}},
    ),
    "actors": (
        {"actors": {"podTemplate": {"spec": {"a": 1}}}},
        {"actors": {"podTemplate": {"spec": {"a": 2}}}},
    ),
    "trainers": ({}, {"trainers": {"podTemplate": {"spec": {"a": 2}}}}),
    "policy": (
        {"staleness": {"policy": "a:B", "own": 1}},
        {"staleness": {"policy": "a:B", "own": 2}},
    ),
}


@pytest.mark.parametrize(("old", "new"), FREE.values(), ids=FREE)
def test_free_forms_are_compared_as_a_whole(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert len(refusals(make_raw(**new), make_raw(**old))) == 1
    assert refusals(make_raw(**old), make_raw(**old)) == []


@pytest.mark.parametrize("path", JOBS, ids=[path.stem for path in JOBS])
def test_shipped_jobs_are_accepted(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    raw["metadata"] |= {"namespace": "lab", "uid": "1"}
    assert refusals(raw) == []
    JobResource.parse(raw)
