"""The objects of a job: their form by the newest schemas, their agreement with the plan, and what
the template hash follows.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_fakes import OLD, make_context, make_raw, make_resource
from operator_goldens import FOLDER, GOLDENS, KL, ON_GPUS, manifests, text

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import parse_wiring
from pipelinerl_common.settings import load_job
from pipelinerl_control.plan import Role, generator_names, num_gpus, process_names
from pipelinerl_operator.objects import (
    Capabilities,
    JobResource,
    PodSpec,
    desired_objects,
    job_secret,
)
from pipelinerl_operator.objects.context import Peer
from pipelinerl_operator.objects.names import port_of
from pipelinerl_operator.objects.scheduling import in_gang
from pipelinerl_trainer.__main__ import parse_flags
from pipelinerl_trainer.launch import parse_node

MAX_NAME = 63
NEWEST = kubernetes_validate.latest_version()


def check_form(manifest: dict[str, Any]) -> None:
    """By the newest schema; what an old server calls policy/v1beta1 has the form of policy/v1.
    PodGroups have no schema.
    """
    if manifest["kind"] != "PodGroup":
        version = manifest["apiVersion"].replace("policy/v1beta1", "policy/v1")
        kubernetes_validate.validate({**manifest, "apiVersion": version}, NEWEST, strict=True)


def by_kind(job: JobResource, kind: str, **context: Any) -> list[dict[str, Any]]:
    return [
        each
        for each in desired_objects(job, make_context(**context)).config
        if each["kind"] == kind
    ]


def pod(job: JobResource, name: str, **context: Any) -> dict[str, Any]:
    return next(
        each
        for each in desired_objects(job, make_context(**context)).pods
        if each.name == f"{job.name}-{name}"
    ).manifest(0)


def container(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    spec = manifest["spec"]
    return next(
        each
        for each in [*spec["containers"], *spec.get("initContainers", [])]
        if each["name"] == name
    )


def argv(manifest: dict[str, Any], name: str) -> list[str]:
    return [*container(manifest, name)["command"], *container(manifest, name)["args"]]


def values(arguments: list[str], flag: str) -> list[str]:
    return [arguments[at + 1] for at, part in enumerate(arguments) if part == flag]


# Form


@pytest.mark.parametrize("name", GOLDENS)
def test_objects_are_the_golden_ones(name: str) -> None:
    """When they are meant to differ: python operator/tests/operator_goldens.py."""
    assert text(name) == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", GOLDENS)
def test_objects_are_valid_by_the_newest_schemas(name: str) -> None:
    for manifest in manifests(name):
        check_form(manifest)


SECTIONS = st.fixed_dictionaries(
    {
        "actors": st.builds(
            lambda replicas, generators, has_gpus: {
                "replicas": replicas,
                "generatorsPerReplica": generators,
                "gpusPerReplica": generators if has_gpus else 0,
            },
            st.integers(1, 3),
            st.integers(1, 2),
            st.booleans(),
        ),
        "trainers": st.fixed_dictionaries(
            {
                "replicas": st.integers(1, 3),
                "processesPerNode": st.integers(1, 3),
                "checkpoint": st.sampled_from([{"pvc": "claim"}, {"uri": "file:///mnt"}]),
            }
        ),
        "sharedMemorySize": st.sampled_from(["0", "1Gi"]),
        "network": st.sampled_from(
            [{}, {"rdma": {"resourceName": "rdma/hca"}}, {"interface": "eth0"}]
        ),
        "scheduling": st.sampled_from(
            [
                {},
                {"gang": {"backend": "volcano"}},
                {"gang": {"backend": "coscheduling"}},
                {"topologyKey": "rack"},
            ]
        ),
    },
    optional={
        "reference": st.fixed_dictionaries({"replicas": st.integers(1, 2)}),
        "evaluation": st.fixed_dictionaries(
            {"everySteps": st.just(100), "sets": st.just([{"name": "held-out", "path": "a:B"}])},
            optional={"gpusPerReplica": st.sampled_from([0, 2])},
        ),
    },
)
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def any_job(sections: dict[str, Any]) -> JobResource:
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}} if "reference" in sections else {}
    return make_resource("a" * 40, **sections, **kl)


@QUICK
@given(SECTIONS, st.sampled_from([Capabilities(), OLD]))
def test_every_object_is_valid_and_its_name_fits(
    sections: dict[str, Any], capabilities: Capabilities
) -> None:
    job = any_job(sections)
    wanted = desired_objects(job, make_context(capabilities=capabilities))
    made = [*wanted.config, *(each.manifest(0, ["n1", "n2"]) for each in wanted.pods)]
    names = Counter((each["kind"], each["metadata"]["name"]) for each in made)
    assert set(names.values()) == {1}
    for manifest in made:
        assert len(manifest["metadata"]["name"]) <= MAX_NAME
        assert all(len(value) <= MAX_NAME for value in manifest["metadata"]["labels"].values())
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == job.uid
        check_form(manifest)


def names_in(manifest: dict[str, Any]) -> Iterator[str]:
    """Names in the plan of the processes that a pod's containers start."""
    for each in manifest["spec"]["containers"]:
        (first,) = values(each["args"], "--name")
        role, _, number = first.rpartition("-")
        for offset in range(int((values(each["args"], "--processes") or ["1"])[0])):
            yield f"{role}-{int(number) + offset}"


@QUICK
@given(SECTIONS)
def test_pods_carry_exactly_the_processes_of_the_plan(sections: dict[str, Any]) -> None:
    job = any_job(sections)
    pods = [(each, each.manifest(0)) for each in desired_objects(job, make_context()).pods]
    carried = [name for _, manifest in pods for name in names_in(manifest)]
    assert sorted(carried) == sorted(process_names(job.job))
    for spec, manifest in pods:
        assert (
            tuple(each["name"] for each in manifest["spec"]["containers"]) == spec.main_containers
        )
        ports = [
            port["containerPort"]
            for each in manifest["spec"]["containers"]
            for port in each.get("ports", [])
        ]
        assert len(ports) == len(set(ports))
        asked = [
            int(each.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
            for each in manifest["spec"]["containers"]
        ]
        assert sum(asked) == sum(num_gpus(job.job, name) for name in names_in(manifest))


@QUICK
@given(SECTIONS)
def test_every_pod_passes_the_restricted_level_and_can_write_where_it_must(
    sections: dict[str, Any],
) -> None:
    for each in desired_objects(any_job(sections), make_context()).pods:
        spec = each.manifest(0)["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.get("hostNetwork")
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            security = one["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert {mount["name"] for mount in one["volumeMounts"]} == volumes
            written = [
                mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")
            ]
            folders = [*values(one["args"], "--output"), *values(one["args"], "--cache"), "/tmp"]
            folders += [
                variable["value"]
                for variable in one["env"]
                if variable["name"] in ("HOME", "HF_HOME")
            ]
            mounted = sections["trainers"]["checkpoint"].get("uri") and each.role in (
                Role.TRAINER,
                Role.EVALUATOR,
            )
            for folder in folders:
                is_users = mounted and folder == "/mnt"
                assert is_users or any(Path(folder).is_relative_to(path) for path in written), (
                    folder
                )


# Wiring


def test_services_understand_their_command_lines() -> None:
    job = make_resource(**ON_GPUS)
    for each in desired_objects(job, make_context(has_nats_credentials=True)).pods:
        for one in each.manifest(0)["spec"]["containers"]:
            if each.role is Role.TRAINER:
                wiring, ranks = parse_flags(parse_node(one["args"]).argv(1)[3:])
                assert (ranks.rank, ranks.num_ranks) == (each.index * 8 + 1, 16)
            else:
                wiring = parse_wiring(
                    each.role.value, [part for part in one["args"] if part != "--serve-initial"]
                )
            assert wiring.preprocessor.endswith(":7000")
            assert str(wiring.nats_credentials) == "/etc/pipelinerl/secret/nats.creds"


def test_an_actor_finds_its_generators_on_loopback_and_the_rest_by_dns() -> None:
    job = make_resource(actors={"replicas": 2, "generatorsPerReplica": 2})
    actor = pod(job, "actor-1")
    assert values(argv(actor, "rollout"), "--generator") == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8001",
    ]
    assert values(argv(actor, "generator-1"), "--listen") == ["0.0.0.0:8001"]
    assert values(argv(actor, "rollout"), "--preprocessor") == [
        "sums-preprocessor-0.sums.lab.svc:7000"
    ]
    assert values(argv(actor, "rollout"), "--metrics-listen") == ["0.0.0.0:9090"]
    assert values(argv(actor, "generator-1"), "--metrics-listen") == []
    assert (actor["spec"]["hostname"], actor["spec"]["subdomain"]) == ("sums-actor-1", "sums")


def test_the_trainer_is_reached_by_its_pods_address() -> None:
    """Generators receive the address that it listens on; a DNS name may still be a dead pod's."""
    arguments = argv(pod(make_resource(), "trainer-0"), "trainer")
    assert values(arguments, "--listen") == ["$(PRL_POD_IP):7000"]
    assert values(arguments, "--generator") == ["http://sums-actor-0.sums.lab.svc:8000"]


def test_ranks_of_other_nodes_meet_at_the_first_nodes_name() -> None:
    job = make_resource(
        trainers={"replicas": 2, "processesPerNode": 2, "checkpoint": {"pvc": "claim"}}
    )
    first, second = (argv(pod(job, f"trainer-{node}"), "trainer") for node in (0, 1))
    assert values(first, "--master-address") == ["127.0.0.1"]
    assert values(second, "--master-address") == ["sums-trainer-0.sums.lab.svc"]
    assert [values(each, "--rank") for each in (first, second)] == [["0"], ["2"]]
    assert first[:3] == ["python", "-m", "pipelinerl_trainer.launch"]
    assert values(second, "--output") == ["/checkpoints/sums"]


def test_generators_are_listed_for_the_coordinator_by_the_names_of_the_plan() -> None:
    job = make_resource(actors={"replicas": 2, "generatorsPerReplica": 2})
    names = [name for actor in range(2) for name in generator_names(job.job, actor)]
    assert {name: port_of(name) for name in names} == {
        "generator-0-0": 8000,
        "generator-0-1": 8001,
        "generator-1-0": 8000,
        "generator-1-1": 8001,
    }


def test_services_read_the_job_without_what_is_kubernetes_own(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        "actors": {"replicas": 3, "minReplicas": 2, "maxReplicas": 4},
        "autoscale": {"enabled": True},
    }
    job = make_resource(**scaling, suspend=True, staleness={"policy": "areal", "eta": 3})
    (config,) = by_kind(job, "ConfigMap")
    (tmp_path / "job.yaml").write_text(config["data"]["job.yaml"])
    read = load_job(tmp_path / "job.yaml")
    assert (read.name, read.metadata.namespace) == ("sums", "lab")
    assert read.spec.staleness.parameters == {"eta": 3}
    assert read.spec.trainers == job.spec.trainers
    assert not read.spec.suspend
    assert yaml.safe_load(config["data"]["job.yaml"])["spec"] == {
        "model": {"uri": "tiny://arithmetic"},
        "task": {"path": "tasks:Sums"},
        "staleness": {"eta": 3},
        "weightTransfer": {"backend": "gloo"},
    }, "an image of an older release does not know every field"
    (scaled,) = by_kind(
        make_resource(actors={"replicas": 2}, staleness={"policy": "areal", "eta": 3}), "ConfigMap"
    )
    assert scaled == config, "what scaling changes is not in the file"


def test_the_token_is_a_mounted_file() -> None:
    job = make_resource()
    assert job_secret(job, "abc")["stringData"] == {"token": "abc"}
    assert job_secret(job, "abc", "creds")["stringData"] == {"token": "abc", "nats.creds": "creds"}
    for each in desired_objects(job, make_context()).pods:
        manifest = each.manifest(0)
        for one in manifest["spec"]["containers"]:
            assert values(one["args"], "--token-file") == ["/etc/pipelinerl/secret/token"]
        assert "abc" not in json.dumps(manifest)


def test_the_stream_servers_certificates_lie_beside_the_job_file() -> None:
    job = make_resource()
    (config,) = by_kind(job, "ConfigMap", nats_ca="certificates")
    assert config["data"]["nats-ca.crt"] == "certificates"
    manifest = pod(job, "preprocessor-0", nats_ca="certificates")
    arguments = argv(manifest, "preprocessor")
    (file,), (job_file,) = values(arguments, "--nats-ca-file"), values(arguments, "--job")
    assert file == str(Path(job_file).with_name("nats-ca.crt"))
    assert "--nats-ca-file" not in argv(pod(job, "preprocessor-0"), "preprocessor")


def test_the_service_publishes_pods_before_they_are_ready() -> None:
    (service,) = by_kind(make_resource(), "Service")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == "sums"


# Probes, time limits, disruption


def test_probes_of_a_generator_wait_as_long_as_the_job_says() -> None:
    manifest = pod(make_resource(actors={"startupTimeoutSeconds": 95}), "actor-0")
    generator = container(manifest, "generator-0")
    assert (
        generator["startupProbe"]["failureThreshold"] * generator["startupProbe"]["periodSeconds"]
        == 100
    )
    assert generator["livenessProbe"]["httpGet"]["path"] == "/health"
    assert generator["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert "livenessProbe" not in container(manifest, "rollout")


def test_trainers_are_never_killed_by_a_probe() -> None:
    trainer = container(pod(make_resource(), "trainer-0"), "trainer")
    assert not {"livenessProbe", "startupProbe"} & trainer.keys()


def test_old_servers_open_the_port_where_new_ones_ask_the_health_service() -> None:
    ask = {"grpc": {"port": 7000}}, {"tcpSocket": {"port": 7000}}
    for capabilities, expected in zip((Capabilities(), OLD), ask, strict=True):
        probe = container(
            pod(make_resource(), "preprocessor-0", capabilities=capabilities), "preprocessor"
        )["readinessProbe"]
        assert expected.items() <= probe.items()


def test_pods_have_the_time_to_drain() -> None:
    job = make_resource(actors={"drainSeconds": 90.5}, trainers={"drainSeconds": 600})
    grace = {
        name: pod(job, name)["spec"]["terminationGracePeriodSeconds"]
        for name in ("actor-0", "trainer-0", "preprocessor-0")
    }
    assert grace == {"actor-0": 121, "trainer-0": 630, "preprocessor-0": 30}


def test_only_trainers_ask_not_to_be_moved() -> None:
    job = make_resource()
    marks = {"karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"}
    assert marks <= pod(job, "trainer-0")["metadata"]["annotations"].keys()
    assert not marks & pod(job, "actor-0")["metadata"]["annotations"].keys()


def test_budgets_keep_all_trainers_and_the_fewest_actors() -> None:
    job = make_resource(
        actors={"replicas": 4, "minReplicas": 2},
        trainers={"replicas": 3, "checkpoint": {"pvc": "c"}},
    )
    for capabilities, version in ((Capabilities(), "policy/v1"), (OLD, "policy/v1beta1")):
        budgets = by_kind(job, "PodDisruptionBudget", capabilities=capabilities)
        assert {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in budgets} == {
            "sums-trainer": 3,
            "sums-actor": 2,
        }
        assert {each["apiVersion"] for each in budgets} == {version}


# Network


def test_the_policy_lets_in_the_job_the_operator_and_who_scrapes() -> None:
    peers = {
        "operator": Peer({"app": "operator"}, "system"),
        "monitoring": (Peer({"app": "prometheus"}, "monitoring"),),
    }
    (policy,) = by_kind(make_resource(actors={"generatorsPerReplica": 2}), "NetworkPolicy", **peers)
    own, operator, scrapers = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"pipelinerl.dev/job": "sums"}}}]}
    assert operator["from"][0]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "system"}
    }
    assert [port["port"] for port in scrapers["ports"]] == [9090, 8000, 8001]
    (old,) = by_kind(make_resource(), "NetworkPolicy", capabilities=OLD, **peers)
    assert old["spec"]["ingress"][1]["from"] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "operator"}}}
    ]
    assert by_kind(make_resource(), "NetworkPolicy", network_policy=False) == []


def test_rdma_devices_go_to_containers_with_gpus_and_locking_memory_is_asked_for_only_when_wanted() -> (  # noqa: E501
    None
):
    job = make_resource(
        **{**ON_GPUS, "network": {"rdma": {"resourceName": "rdma/hca", "count": 2}}}
    )
    trainer = container(pod(job, "trainer-0"), "trainer")
    assert (
        trainer["resources"]["limits"]
        == {"nvidia.com/gpu": "8", "rdma/hca": "16"}
        == trainer["resources"]["requests"]
    )
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    locked = container(pod(make_resource(**ON_GPUS), "trainer-0"), "trainer")
    assert locked["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "resources" not in container(pod(job, "actor-0"), "rollout")


# Placement


@pytest.mark.parametrize("backend", ["volcano", "coscheduling"])
def test_the_gang_is_trainers_preprocessor_and_the_fewest_actors(backend: str) -> None:
    scheduling = {"gang": {"backend": backend, "timeoutSeconds": 60}}
    job = make_resource(
        **{
            **ON_GPUS,
            "actors": {**ON_GPUS["actors"], "replicas": 3, "minReplicas": 2},
            "scheduling": scheduling,
        }
    )
    (group,) = by_kind(job, "PodGroup")
    members = [
        each.name
        for each in desired_objects(job, make_context()).pods
        if in_gang(job, each.role, each.index)
    ]
    assert members == [
        "sums-preprocessor-0",
        "sums-trainer-0",
        "sums-trainer-1",
        "sums-actor-0",
        "sums-actor-1",
    ]
    assert group["spec"]["minMember"] == 5
    assert group["spec"]["minResources"] == {"nvidia.com/gpu": str(2 * 4 + 2 * 8)}
    marked = [
        each.name
        for each in desired_objects(job, make_context()).pods
        if "sums"
        in (
            each.manifest(0)["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
            each.manifest(0)["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
        )
    ]
    assert marked == members
    assert {
        each.manifest(0)["spec"]["schedulerName"]
        for each in desired_objects(job, make_context()).pods
    } == {{"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}[backend]}


def test_without_a_gang_there_is_no_group_and_no_scheduler_is_named() -> None:
    job = make_resource()
    assert by_kind(job, "PodGroup") == []
    assert "schedulerName" not in pod(job, "actor-0")["spec"]


def test_excluded_nodes_are_excluded_from_every_alternative_of_the_template() -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
    node = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [term, {**term, "matchFields": []}]
        }
    }
    job = make_resource(
        actors={"podTemplate": {"spec": {"affinity": {"nodeAffinity": node}}}},
        scheduling={"topologyKey": "rack"},
    )
    actor = next(
        each for each in desired_objects(job, make_context()).pods if each.role is Role.ACTOR
    )
    affinity = actor.manifest(0, ["b", "a", "a"])["spec"]["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    avoid = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")]
    assert [each["matchFields"] for each in terms] == [avoid, avoid]
    assert [each["matchExpressions"] for each in terms] == [term["matchExpressions"]] * 2
    (preferred,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "rack"
    assert actor.manifest(0)["spec"]["affinity"]["nodeAffinity"] == node, (
        "the template itself is untouched"
    )


def test_pods_with_gpus_tolerate_their_taint() -> None:
    job = make_resource(**ON_GPUS)
    assert pod(job, "trainer-0")["spec"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert "tolerations" not in pod(job, "preprocessor-0")["spec"]


# The hash

EVALUATION: dict[str, Any] = {
    "evaluation": {"everySteps": 100, "sets": [{"name": "held-out", "path": "a:B"}]},
    "trainers": {"checkpoint": {"pvc": "claim"}},
}
CHANGES: list[dict[str, Any]] = [
    {"seed": 1},
    {"algorithm": {"steps": 7}},
    {"staleness": {"policy": "areal", "eta": 2}},
    {"image": "mine:1"},
    {"imagePullSecrets": [{"name": "s"}]},
    {"env": [{"name": "A", "value": "1"}]},
    {"model": {"uri": "tiny://arithmetic", "cache": {"pvc": "models"}}},
    {"model": {"uri": "tiny://arithmetic", "cache": {"emptyDir": {}}}},
    {"actors": {"replicas": 2}},
    {"actors": {"replicas": 2, "minReplicas": 2}},
    {"actors": {"maxReplicas": 9}},
    {"actors": {"maxReplicas": 9}, "autoscale": {"enabled": True}},
    {"actors": {"image": "mine:1"}},
    {"actors": {"startupTimeoutSeconds": 10}},
    {"actors": {"generatorsPerReplica": 2}},
    {"actors": {"gpusPerReplica": 1}},
    {"actors": {"podTemplate": {"spec": {"nodeName": "a"}}}},
    {"preprocessor": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}},
    {"trainers": {"drainSeconds": 1}},
    {"trainers": {"processesPerNode": 2}},
    {"trainers": {"checkpoint": {"pvc": "claim"}}},
    {"trainers": {"checkpoint": {"keep": 9}}},
    {"scheduling": {"gang": {"backend": "volcano"}}},
    {"scheduling": {"gang": {"backend": "coscheduling"}}},
    {"scheduling": {"gang": {"timeoutSeconds": 5}}},
    {"scheduling": {"schedulerName": "volcano"}},
    {"scheduling": {"priorityClassName": "high"}},
    {"scheduling": {"topologyKey": "rack"}},
    {"network": {"interface": "eth0"}},
    {"network": {"ncclInterface": "ib"}},
    {"network": {"rdma": {"resourceName": "rdma/hca"}}},
    {"sharedMemorySize": "0"},
    {"suspend": True},
    {"restart": {"id": "again"}},
    {"failurePolicy": {"maxRestarts": 1}},
    {"ttlSecondsAfterFinished": 5},
    {"cleanPodPolicy": "All"},
    KL,
    {**KL, "reference": {"startupTimeoutSeconds": 5}},
    {**KL, "reference": {"image": "mine:1"}},
    EVALUATION,
    {
        "evaluation": {**EVALUATION["evaluation"], "image": "mine:1"},
        "trainers": EVALUATION["trainers"],
    },
    {
        "evaluation": {**EVALUATION["evaluation"], "everySteps": 200},
        "trainers": EVALUATION["trainers"],
    },
]


def combined(changes: list[int]) -> JobResource:
    spec: dict[str, Any] = {}
    for number in changes:
        for name, value in CHANGES[number].items():
            spec[name] = (
                {**spec[name], **value}
                if isinstance(spec.get(name), dict) and isinstance(value, dict)
                else value
            )
    return make_resource(**spec)


def what_it_is(spec: PodSpec, job: JobResource) -> tuple[str, str]:
    manifest = spec.manifest(0)
    del manifest["metadata"]["annotations"]["pipelinerl.dev/template-hash"]
    (config,) = by_kind(job, "ConfigMap")
    return json.dumps(manifest, sort_keys=True), config["data"]["job.yaml"]


SOME_CHANGES = st.lists(st.integers(0, len(CHANGES) - 1), max_size=3, unique=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SOME_CHANGES, SOME_CHANGES)
def test_the_hash_changes_exactly_when_the_pod_or_what_it_reads_does(
    one: list[int], other: list[int]
) -> None:
    try:
        jobs = [combined(one), combined(other)]
    except SettingsError:
        return  # the changes do not go together
    first, second = (
        {each.name: (each, job) for each in desired_objects(job, make_context()).pods}
        for job in jobs
    )
    for name in first.keys() & second.keys():
        (pod_1, job_1), (pod_2, job_2) = first[name], second[name]
        is_same = what_it_is(pod_1, job_1) == what_it_is(pod_2, job_2)
        assert (pod_1.template_hash == pod_2.template_hash) == is_same, (one, other, name)


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_the_hash_follows_each_single_change(number: int) -> None:
    try:
        job = combined([number])
    except SettingsError:
        pytest.fail(f"{CHANGES[number]} is no valid change")
    base = {each.name: each for each in desired_objects(make_resource(), make_context()).pods}
    for each in desired_objects(job, make_context()).pods:
        if each.name in base:
            is_same = what_it_is(each, job) == what_it_is(base[each.name], make_resource())
            assert (each.template_hash == base[each.name].template_hash) == is_same, each.name


def test_another_operator_finds_the_same_hash() -> None:
    job = make_resource()
    contexts = [
        make_context(),
        make_context(
            images={role: "registry/all:2" for role in Role},
            coordinator="elsewhere:1",
            nats_url="nats://elsewhere",
            capabilities=OLD,
            image_pull_secrets=("more",),
            log_level="debug",
        ),
    ]
    first, second = (
        [each.template_hash for each in desired_objects(job, context).pods] for context in contexts
    )
    assert first == second


def test_the_hash_is_in_the_pod_and_the_same_for_every_attempt() -> None:
    each = desired_objects(make_resource(), make_context()).pods[0]
    for attempt in (0, 3):
        manifest = each.manifest(attempt, ["node"])
        assert (
            manifest["metadata"]["annotations"]["pipelinerl.dev/template-hash"]
            == each.template_hash
        )
        assert manifest["metadata"]["labels"]["pipelinerl.dev/attempt"] == str(attempt)


def test_defaults_that_the_server_filled_in_do_not_count() -> None:
    raw = make_raw()
    filled = make_raw(
        **{
            **raw["spec"],
            "failurePolicy": {"maxRestarts": 10},
            "actors": {"replicas": 1, "generator": {}},
        }
    )
    first, second = (
        desired_objects(JobResource.parse(each), make_context()).pods for each in (raw, filled)
    )
    assert [each.template_hash for each in first] == [each.template_hash for each in second]


def test_manifests_of_a_golden_read_back_as_they_are() -> None:
    for name in GOLDENS:
        assert list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())) == manifests(name)
