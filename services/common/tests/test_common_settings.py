"""The job file: what is read, and how every kind of mistake is reported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import BaseModel

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import (
    Job,
    cluster_only_paths,
    load_job,
    parse_job,
    parse_newer_job,
    service_view,
)
from pipelinerl_common.settings.load import read_yaml, write_yaml
from pipelinerl_staleness.areal import ArealSettings
from pipelinerl_staleness.conventional import ConventionalSettings


def document(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "maths"},
        "spec": {
            "model": {"uri": "tiny://arithmetic"},
            "task": {"path": "package.module:Task"},
            **spec,
        },
    }


def write(folder: Path, content: object) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8"
    )
    return path


def fault(content: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_job(content, source="job.yaml")
    return str(caught.value)


def test_the_smallest_job_has_the_documented_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, document()))
    assert job.name == "maths"
    assert job.spec.task.group_size == 8
    assert job.spec.algorithm.truncation == 5.0
    assert job.spec.weight_transfer.mode == "staged"
    assert job.spec.staleness.parse() == ArealSettings(eta=1)
    assert job.spec.reference is None


def test_camel_case_and_snake_case_mean_the_same() -> None:
    camel = parse_job(
        document(algorithm={"groupsPerStep": 4, "optimizer": {"maxGradNorm": 0.1}}), "job.yaml"
    )
    snake = parse_job(
        document(algorithm={"groups_per_step": 4, "optimizer": {"max_grad_norm": 0.1}}), "job.yaml"
    )
    assert camel == snake
    assert camel.spec.algorithm.groups_per_step == 4


def test_json_is_read_too(tmp_path: Path) -> None:
    job = load_job(
        write(
            tmp_path, parse_job(document(), "x").model_dump_json(by_alias=True, exclude_none=True)
        )
    )
    assert job == parse_job(document(), "x")


def test_settings_cannot_be_changed_afterwards() -> None:
    job = parse_job(document(), "job.yaml")
    with pytest.raises(ValueError, match="frozen"):
        job.spec.seed = 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("spec: [", "not valid YAML"),
        ("- a\n- b\n", "a job file is a mapping with apiVersion"),
        ("", "a job file is a mapping"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_job_is_told_so(tmp_path: Path, content: str, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(SettingsError, match=says) as caught:
        load_job(path)
    assert str(path) in str(caught.value)


ARGUMENTS = """{lr: 1e-6, big: 1E3, half: .5, whole: 10, octal: 010, hex: 0x10, many: 1_000,
  time: 12:30, day: 2026-11-30, no_number: 1e, version: 1.2.3, quoted: '1e-6',
  inherited: {<<: &base {a: 1}, b: 2}, again: {<<: *base, a: 3}, off: off}"""
READ = {
    "lr": 1e-6,
    "big": 1000.0,
    "half": 0.5,
    "whole": 10,
    "octal": 8,
    "hex": 16,
    "many": 1000,
    "time": "12:30",
    "day": "2026-11-30",
    "no_number": "1e",
    "version": "1.2.3",
    "quoted": "1e-6",
    "inherited": {"a": 1, "b": 2},
    "again": {"a": 3},
    False: False,
}


def test_yaml_means_what_it_means_to_kubernetes() -> None:
    assert read_yaml(ARGUMENTS) == READ


@examples(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        st.lists,
        max_leaves=5,
    )
)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert read_yaml(write_yaml({"key": value})) == {"key": value}


@pytest.mark.parametrize(
    "text",
    ["1e-6", "1E3", "12:30", "2026-11-30", "010", "no", ".5", "1.0", "~", "1_000", "0x1f", ".inf"],
)
def test_a_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert read_yaml(write_yaml([text])) == yaml.safe_load(write_yaml([text])) == [text]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "spec:\n  seed: 1\n  task: {}\n  seed: 2\n",
            "'seed' is there twice, in lines 2 and 4: put both together",
        ),
        ("spec: {seed: 1, seed: 1}", "'seed' is there twice, in lines 1 and 1"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("a: " + "b" * (1 << 20), "has more than 1 MiB"),
    ],
)
def test_a_file_that_hides_something_or_takes_too_much_is_refused(
    tmp_path: Path, content: str, says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_job(write(tmp_path, content))
    assert says in str(caught.value)


def test_fields_of_a_newer_version_are_left_out_and_named() -> None:
    tomorrow = document(
        colour={"of": "hats"},
        trainers={"hats": 2, "replicas": 3},
        algorithm={"kl": {"shape": "round"}},
    )
    job, unknown = parse_newer_job(tomorrow, "it")
    assert job == parse_job(document(trainers={"replicas": 3}), "it")
    assert sorted(unknown) == ["spec.algorithm.kl.shape", "spec.colour", "spec.trainers.hats"]
    assert tomorrow["spec"]["colour"] == {"of": "hats"}
    assert parse_newer_job(document(), "it")[1] == ()


def test_other_faults_of_a_newer_version_are_told_as_ever() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_newer_job(document(colour="red", algorithm={"loss": "dpo"}), "it")
    assert "1 fault in the job file\n  spec.algorithm.loss: Input should be" in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"nowhere\.yaml: there is no such file; give a job file \(YAML\)$"
    ):
        load_job(tmp_path / "nowhere.yaml")
    (tmp_path / "my-first.yaml").write_text("")
    with pytest.raises(SettingsError, match=r"did you mean 'my-first\.yaml'\?"):
        load_job(tmp_path / "my_first.yaml")
    with pytest.raises(
        SettingsError, match=r"sums:Sums: this is the name of a task, but a job file .* is needed"
    ):
        load_job(Path("sums:Sums"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match=r"binary\.yaml: cannot be read"):
        load_job(binary)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"algorithm": {"groupsPerStp": 4}},
            "spec.algorithm.groupsPerStp: unknown field; did you mean 'groupsPerStep'?",
        ),
        (
            {"algorithm": {"optimizer": {"learningrate": 1}}},
            "unknown field; did you mean 'learningRate'?",
        ),
        (
            {"algorithm": {"optimizer": {"lern": 1}}},
            "optimizer.lern: unknown field; did you mean 'learningRate'?",
        ),
        (
            {"algorithm": {"learningRate": 1}},
            "unknown field; did you mean 'spec.algorithm.optimizer.learningRate'?",
        ),
        ({"xyzzy": 1}, "spec.xyzzy: unknown field"),
        (
            {"reference": {"replica": 1}, "algorithm": {"kl": {"coefficient": 0.1}}},
            "did you mean 'replicas'?",
        ),
        (
            {"algorithm": {"steps": 0}},
            "spec.algorithm.steps: Input should be greater than or equal to 1 (got 0)",
        ),
        ({"algorithm": {"steps": "many"}}, "(got 'many')"),
        (
            {"algorithm": {"loss": "dpo"}},
            "1 fault in the job file\n  spec.algorithm.loss: Input should be 'reinforce', 'ppo', "
            "'grpo'",
        ),
        ({"trainers": {"zeroStage": 4}}, "spec.trainers.zeroStage"),
        ({"task": {"path": "no colon"}}, "is not of the form 'package.module:Name'"),
        ({"model": {}}, "spec.model.uri: missing"),
        (
            {"staleness": {"policy": "areal", "etta": 1}},
            "policy 'areal' has no parameter 'etta': it has eta, maxConcurrent; did you mean "
            "'eta'?",
        ),
        (
            {"staleness": {"policy": "areal", "maxConcurrent": 0}},
            "maxConcurrent=0 must be a whole number",
        ),
        ({"staleness": {"policy": "areel"}}, "; did you mean 'areal'?"),
        (
            {"staleness": {"eta": 10**20}},
            "eta=100000000000000000000 must be a whole number of at most 1000000000",
        ),
        (
            {"algorithm": {"groupsPerStep": 10**20}},
            "groupsPerStep: Input should be less than or equal to 1000000",
        ),
        (
            {"algorithm": {"steps": 10**20}},
            "steps: Input should be less than or equal to 1000000000",
        ),
        (
            {"seed": 1 << 63},
            "spec.seed: must be at most 9223372036854775807, the largest whole number that "
            "Kubernetes keeps",
        ),
        (
            {"evaluation": {"everySteps": 1, "sets": [{"nam": "a"}]}},
            "sets.0.nam: unknown field; did you mean 'name'?",
        ),
        (
            {"staleness": {"policy": "areel"}},
            "unknown staleness policy 'areel': choose one of areal, conventional",
        ),
        ({"staleness": {"eta": -1}}, "eta=-1 must be a whole number of at least 0"),
        (
            {"staleness": {"policy": "trl", "queueGroups": 3, "queue_groups": 9}},
            "queueGroups=3 and queue_groups=9 are one",
        ),
        (
            {"algorithm": {"optimizer": {"learningRate": float("inf")}}},
            "learningRate: Input should be a finite number (got inf)",
        ),
        (
            {"algorithm": {"optimizer": {"learningRate": True}}},
            "learningRate: must be a number, not a boolean",
        ),
        (
            {"seed": False},
            "spec.seed: must be a number, not a boolean, as which YAML also reads yes, no, on and "
            "off (got False)",
        ),
        (
            {"preprocessor": {"ringBufferGroups": True}},
            "ringBufferGroups: must be a number, not a boolean",
        ),
    ],
)
def test_a_wrong_field_is_named_with_value_and_remedy(spec: dict[str, Any], says: str) -> None:
    assert says in fault(document(**spec))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"algorithm": {"kl": {"coefficient": 0.5}}},
            ["algorithm.kl.coefficient=0.5", "spec.reference is not set"],
        ),
        ({"reference": {}}, ["spec.reference is set", "algorithm.kl.coefficient=0"]),
        (
            {"task": {"path": "a:B", "sampling": {"maxTokens": 4096}}},
            ["task.sampling.maxTokens=4096", "model.maxModelLen=4096"],
        ),
        (
            {"trainers": {"microBatchTokens": 100}},
            ["trainers.microBatchTokens=100", "model.maxModelLen=4096"],
        ),
        (
            {"trainers": {"processesPerNode": 4, "sequenceParallelSize": 3}},
            ["trainers.processesPerNode=4", "trainers.sequenceParallelSize=3"],
        ),
        (
            {"task": {"path": "a:B", "groupSize": 1}},
            ["algorithm.baseline=leave_one_out", "task.groupSize", "not 1"],
        ),
        (
            {"algorithm": {"steps": 5, "optimizer": {"warmupSteps": 6}}},
            ["optimizer.warmupSteps=6", "steps=5"],
        ),
    ],
)
def test_fields_that_contradict_each_other_are_both_shown(
    spec: dict[str, Any], says: list[str]
) -> None:
    message = fault(document(**spec))
    for part in says:
        assert part in message


def test_all_faults_are_listed_at_once() -> None:
    message = fault(document(algorithm={"steps": 0, "loss": "dpo"}, trainers={"zeroStage": 4}))
    assert message.startswith("job.yaml: 3 faults in the job file\n")
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("name", ["Maths", "a_b", "-a", "a-", "", "a" * 41, "a.b"])
def test_a_name_that_kubernetes_or_the_stream_cannot_take_is_refused(name: str) -> None:
    assert "metadata.name" in fault({**document(), "metadata": {"name": name}})


@pytest.mark.parametrize("change", [{"apiVersion": "v1"}, {"kind": "Job"}])
def test_another_kind_of_document_is_refused(change: dict[str, Any]) -> None:
    assert next(iter(change)) in fault({**document(), **change})


def test_overrides_replace_and_add_values(tmp_path: Path) -> None:
    path = write(tmp_path, document(algorithm={"steps": 10}))
    job = load_job(
        path,
        [
            "algorithm.steps=20",
            "spec.seed=7",
            "staleness.eta=3",
            "task.sampling.stop=['.', '=']",
            "model.uri=/models/with=sign",
            "reference={}",
            "algorithm.kl.coefficient=0.1",
        ],
    )
    assert job.spec.algorithm.steps == 20
    assert job.spec.seed == 7
    assert job.spec.staleness.parse() == ArealSettings(eta=3)
    assert job.spec.task.sampling.stop == [".", "="]
    assert job.spec.model.uri == "/models/with=sign"
    assert job.spec.reference is not None


def test_an_override_in_snake_case_replaces_what_the_file_says_in_camel_case(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path, document(algorithm={"groupsPerStep": 4}, weightTransfer={"bucketBytes": 2048})
    )
    job = load_job(path, ["algorithm.groups_per_step=8", "weight_transfer.bucket_bytes=4096"])
    assert job.spec.algorithm.groups_per_step == 8
    assert job.spec.weight_transfer.bucket_bytes == 4096


def test_a_tasks_own_arguments_keep_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, document(task={"path": "a:B", "args": {"max_digits": 1}}))
    job = load_job(path, ["task.args.maxDigits=2", "task.args.max_digits=3"])
    assert job.spec.task.args == {"max_digits": 3, "maxDigits": 2}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.steps", "expected path=value"),
        ("=3", "expected path=value"),
        ("algorithm..steps=3", "expected path=value"),
        ("algorithm.steps=[", "not valid YAML"),
        ("seed.x=1", "spec.seed is not a mapping"),
        ("algorithm.stepps=3", "did you mean 'steps'?"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, says: str) -> None:
    path = write(tmp_path, document(seed=3))
    with pytest.raises(SettingsError) as caught:
        load_job(path, [override])
    assert says in str(caught.value)


def test_the_conventional_policy_has_its_own_parameters() -> None:
    job = parse_job(
        document(staleness={"policy": "conventional", "stepsPerGeneration": 4}), "job.yaml"
    )
    assert job.spec.staleness.parse() == ConventionalSettings(steps_per_generation=4)


def _models(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    _models(candidate, seen)
    return seen


def test_every_field_is_documented() -> None:
    """Sections too, since `kubectl explain` shows it; `metadata` is described by Kubernetes."""
    undocumented = [
        f"{model.__name__}.{name}"
        for model in _models(Job, set())
        if model.__name__ not in ("Job", "Metadata")
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert undocumented == []


def test_settings_are_read_without_torch_or_the_network_libraries() -> None:
    program = (
        "import sys; import pipelinerl_common.settings; "
        "print(sorted(m for m in ('torch', 'vllm', 'transformers', 'grpc', 'nats') if m in "
        "sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output == "[]\n"


def test_what_only_kubernetes_reads_is_listed_where_it_is_set_and_hidden_from_services() -> None:
    cluster = {
        "suspend": True,
        "actors": {"replicas": 2, "minReplicas": 2, "podTemplate": {"spec": {"nodeName": "a"}}},
        "trainers": {"checkpoint": {"everySteps": 5, "pvc": "claim"}},
        "model": {"uri": "tiny://arithmetic", "cache": {"pvc": "models"}},
        "failurePolicy": {"maxRestarts": 10},
    }
    spec = parse_job(document(**cluster), "job.yaml").spec
    assert cluster_only_paths(spec) == [
        "model.cache",
        "actors.podTemplate",
        "trainers.checkpoint.pvc",
        "suspend",
    ]
    view = service_view(spec)
    assert view["trainers"]["checkpoint"] == {"everySteps": 5, "keep": 2}
    assert view["actors"]["replicas"] == 2
    assert not {"suspend", "failurePolicy", "scheduling"} & view.keys()
    assert parse_job(document(**view), "services").spec.algorithm == spec.algorithm


def test_a_job_without_cluster_fields_lists_none() -> None:
    assert (
        cluster_only_paths(
            parse_job(document(staleness={"policy": "areal", "eta": 2}), "job.yaml").spec
        )
        == []
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"actors": {"minReplicas": 3}}, "actors.minReplicas=3 is more than actors.replicas=1"),
        (
            {"actors": {"replicas": 3, "maxReplicas": 2}},
            "actors.replicas=3 is more than actors.maxReplicas=2",
        ),
        (
            {"actors": {"gpusPerReplica": 1, "generator": {"tensorParallelSize": 2}}},
            "actors.gpusPerReplica=1 must be 0 (CPU) or 2",
        ),
        (
            {
                "actors": {
                    "gpusPerReplica": 8,
                    "generatorsPerReplica": 3,
                    "generator": {"tensorParallelSize": 2},
                }
            },
            "actors.gpusPerReplica=8 must be 0 (CPU) or 6: actors.generatorsPerReplica=3 times",
        ),
        ({"model": {"uri": "a", "cache": {}}}, "exactly one of pvc and emptyDir"),
        ({"trainers": {"checkpoint": {"pvc": "a", "uri": "file:///a"}}}, "both pvc and uri"),
        (
            {"env": [{"name": "PRL_JOB"}]},
            "PRL_JOB: names that begin with PRL_ are set by the operator",
        ),
        ({"autoscale": {"enabled": True}}, "needs actors.maxReplicas"),
        ({"sharedMemorySize": "lots"}, "spec.sharedMemorySize"),
    ],
)
def test_wrong_cluster_fields_are_refused_on_a_laptop_too(spec: dict[str, Any], says: str) -> None:
    assert says in fault(document(**spec))


def test_where_there_are_gpus_the_trainers_divide_everything_and_store_no_activations() -> None:
    on_cpu = parse_job(document(), source="test").spec
    assert (on_cpu.zero_stage, on_cpu.checkpoints_activations) == (1, False)
    actors = {"gpusPerReplica": 1}
    on_gpus = parse_job(document(actors=actors), source="test").spec
    assert (on_gpus.zero_stage, on_gpus.checkpoints_activations) == (3, True)
    trainers = {"zeroStage": 2, "activationCheckpointing": False}
    chosen = parse_job(document(actors=actors, trainers=trainers), source="test").spec
    assert (chosen.zero_stage, chosen.checkpoints_activations) == (2, False)
