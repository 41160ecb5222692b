"""The user's podTemplate over the operator's pod."""

from typing import Any

import pytest
from operator_fakes import make_context, make_resource
from operator_goldens import ON_GPUS

from pipelinerl_common.errors import SettingsError
from pipelinerl_control.plan import Role
from pipelinerl_operator.objects import desired_objects
from pipelinerl_operator.objects.containers import limit_threads


def actor(template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    sections = {**spec, "actors": {**spec.get("actors", {}), "podTemplate": template}}
    pods = desired_objects(make_resource(**sections), make_context()).pods
    return next(each for each in pods if each.role is Role.ACTOR).manifest(0)


def container(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in manifest["spec"]["containers"] if each["name"] == name)


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize(
    ("resources", "spec", "threads"),
    [
        ({}, {}, None),
        ({}, ON_GPUS, "4"),
        ({"requests": {"cpu": "12"}}, {}, "12"),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "6500m"}}, ON_GPUS, "6"),
        ({"limits": {"cpu": "500m"}}, {}, "1"),
        ({"limits": {"cpu": 3}}, {"env": [{"name": "OMP_NUM_THREADS", "value": "9"}]}, "9"),
    ],
)
def test_a_process_has_as_many_threads_as_its_container_has_cpus(
    resources: dict[str, Any], spec: dict[str, Any], threads: str | None
) -> None:
    named = [{"name": "generator-0", "resources": resources}]
    manifest = actor({"spec": {"containers": named}}, **spec)
    assert variables(container(manifest, "generator-0")).get("OMP_NUM_THREADS") == threads


def test_the_ranks_of_a_node_share_the_cpus_of_their_container() -> None:
    named = [{"name": "trainer", "resources": {"limits": {"cpu": "96"}}}]
    trainers = {**ON_GPUS["trainers"], "podTemplate": {"spec": {"containers": named}}}
    resource = make_resource(**{**ON_GPUS, "trainers": trainers})
    pods = desired_objects(resource, make_context()).pods
    manifest = next(each for each in pods if each.role is Role.TRAINER).manifest(0)
    assert variables(container(manifest, "trainer"))["OMP_NUM_THREADS"] == "12"


@pytest.mark.parametrize(
    ("network", "nccl", "gloo"),
    [
        ({}, None, None),
        ({"interface": "eth0"}, "eth0", "eth0"),
        ({"ncclInterface": "^docker,lo"}, "^docker,lo", None),
        ({"interface": "eth0", "ncclInterface": "ib"}, "ib", "eth0"),
    ],
)
def test_nccl_and_gloo_have_interfaces_of_their_own(
    network: dict[str, Any], nccl: str | None, gloo: str | None
) -> None:
    found = variables(container(actor({}, **{**ON_GPUS, "network": network}), "generator-0"))
    assert (found.get("NCCL_SOCKET_IFNAME"), found.get("GLOO_SOCKET_IFNAME")) == (nccl, gloo)
    assert found["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG" not in variables(container(actor({}), "generator-0"))


def refusal(template: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        actor(template)
    return str(caught.value)


def test_a_quantity_that_is_none_is_left_to_the_server_to_refuse() -> None:
    plain: dict[str, Any] = {"env": [], "resources": {"limits": {"cpu": "many"}}}
    limit_threads(plain, 1)
    assert plain["env"] == []


def test_a_container_of_ours_is_changed_by_name_and_keeps_the_rest() -> None:
    resources = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    manifest = actor(
        {
            "spec": {
                "containers": [{"name": "generator-0", "resources": resources, "image": "mine:1"}]
            }
        }
    )
    before = actor({})
    changed, plain = container(manifest, "generator-0"), container(before, "generator-0")
    assert changed["resources"] == resources
    assert changed["image"] == "mine:1"
    assert changed["env"] == [{"name": "OMP_NUM_THREADS", "value": "2"}, *plain["env"]]
    assert {key: changed[key] for key in plain.keys() - {"image", "env"}} == {
        key: plain[key] for key in plain.keys() - {"image", "env"}
    }
    assert container(manifest, "rollout") == container(before, "rollout")


def test_resources_are_added_to_the_gpus() -> None:
    template = {
        "spec": {
            "containers": [{"name": "generator-0", "resources": {"limits": {"memory": "64Gi"}}}]
        }
    }
    generator = container(actor(template, **ON_GPUS), "generator-0")
    assert generator["resources"]["limits"] == {
        "nvidia.com/gpu": "2",
        "rdma/hca": "2",
        "memory": "64Gi",
    }


def test_sidecars_volumes_and_variables_are_added() -> None:
    mount = {"name": "data", "mountPath": "/data"}
    manifest = actor(
        {
            "metadata": {
                "labels": {"team": "a"},
                "annotations": {"k8s.v1.cni.cncf.io/networks": "roce"},
            },
            "spec": {
                "volumes": [{"name": "data", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "rollout",
                        "env": [{"name": "DATA", "value": "$(PRL_JOB)"}],
                        "volumeMounts": [mount],
                    },
                    {"name": "judge", "image": "judge:1", "ports": [{"containerPort": 5000}]},
                ],
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "nodeSelector": {"pool": "gpu"},
            },
        },
        **ON_GPUS,
    )
    spec = manifest["spec"]
    assert [each["name"] for each in spec["containers"]] == [
        "rollout",
        "generator-0",
        "generator-1",
        "judge",
    ]
    rollout = container(manifest, "rollout")
    assert rollout["env"][-1] == {"name": "DATA", "value": "$(PRL_JOB)"}
    assert rollout["volumeMounts"][-1] == mount
    assert "data" not in {
        each["name"] for each in container(manifest, "generator-0")["volumeMounts"]
    }
    assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert manifest["metadata"]["labels"]["team"] == "a"
    assert manifest["metadata"]["labels"]["pipelinerl.dev/role"] == "actor"
    assert manifest["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "roce"


def test_variables_mounts_and_volumes_of_the_same_name_are_replaced_as_a_whole() -> None:
    manifest = actor(
        {
            "spec": {
                "volumes": [{"name": "cache", "hostPath": {"path": "/nvme"}}],
                "containers": [
                    {
                        "name": "rollout",
                        "env": [
                            {
                                "name": "HF_HOME",
                                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                            }
                        ],
                        "volumeMounts": [
                            {"name": "cache", "mountPath": "/cache", "subPath": "mine"}
                        ],
                    }
                ],
            }
        }
    )
    assert {"name": "cache", "hostPath": {"path": "/nvme"}} in manifest["spec"]["volumes"]
    rollout = container(manifest, "rollout")
    (home,) = [each for each in rollout["env"] if each["name"] == "HF_HOME"]
    assert home == {"name": "HF_HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    (cache,) = [each for each in rollout["volumeMounts"] if each["mountPath"] == "/cache"]
    assert cache["subPath"] == "mine"


def test_null_takes_a_default_away() -> None:
    manifest = actor(
        {
            "spec": {
                "securityContext": {"seccompProfile": None},
                "terminationGracePeriodSeconds": None,
            }
        }
    )
    assert manifest["spec"]["securityContext"] == {"runAsNonRoot": True}
    assert "terminationGracePeriodSeconds" not in manifest["spec"]


def test_init_containers_of_the_user_run_after_the_model_is_there() -> None:
    manifest = actor({"spec": {"initContainers": [{"name": "fetch", "image": "fetch:1"}]}})
    assert [each["name"] for each in manifest["spec"]["initContainers"]] == ["prepare", "fetch"]


def test_one_template_does_not_leak_into_another_pod() -> None:
    template = {"spec": {"containers": [{"name": "rollout", "env": [{"name": "A", "value": "1"}]}]}}
    assert actor(template) == actor(template)
    assert not [each for each in container(actor({}), "rollout")["env"] if each["name"] == "A"]


PATH = "spec.actors.podTemplate"


def test_a_template_that_does_not_fit_is_found_before_any_pod_is_made() -> None:
    with pytest.raises(SettingsError, match="restartPolicy: is the operator's"):
        desired_objects(
            make_resource(trainers={"podTemplate": {"spec": {"restartPolicy": "Always"}}}),
            make_context(),
        )


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"kind": "Pod"}, f"{PATH}.kind: a pod template has metadata and spec only"),
        (
            {"metadata": {"name": "x"}},
            f"{PATH}.metadata.name: only labels and annotations can be set",
        ),
        (
            {"metadata": {"labels": {"pipelinerl.dev/job": "x"}}},
            f"{PATH}.metadata.labels.pipelinerl.dev/job: is the operator's",
        ),
        ({"metadata": {"labels": ["a"]}}, f"{PATH}.metadata.labels: must be a mapping"),
        ({"metadata": "a"}, f"{PATH}.metadata: must be a mapping"),
        (
            {"spec": {"restartPolicy": "Always"}},
            f"{PATH}.spec.restartPolicy: is the operator's ('Never')",
        ),
        ({"spec": {"hostname": "x"}}, f"{PATH}.spec.hostname: is the operator's"),
        ({"spec": {"containers": {"name": "x"}}}, f"{PATH}.spec.containers: must be a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, f"{PATH}.spec.containers[0]: has no name"),
        ({"spec": {"containers": ["rollout"]}}, f"{PATH}.spec.containers[0]: has no name"),
        (
            {"spec": {"containers": [{"name": "rollout", "command": ["sh"]}]}},
            "containers[rollout].command: is the operator's",
        ),
        (
            {"spec": {"containers": [{"name": "rollout", "args": []}]}},
            "containers[rollout].args: is the operator's",
        ),
        (
            {
                "spec": {
                    "containers": [{"name": "rollout", "env": [{"name": "PRL_JOB", "value": "x"}]}]
                }
            },
            "containers[rollout].env[PRL_JOB]: names that begin with PRL_ are the operator's",
        ),
        (
            {"spec": {"containers": [{"name": "x", "ports": [{"containerPort": 8000}]}]}},
            "containers[x].ports: 8000 is the port of container generator-0; choose another",
        ),
        (
            {"spec": {"volumes": [{"name": "secret", "emptyDir": {}}]}},
            "volumes[secret]: is the operator's",
        ),
        (
            {
                "spec": {
                    "containers": [
                        {
                            "name": "rollout",
                            "volumeMounts": [{"name": "a", "mountPath": "/etc/pipelinerl/job"}],
                        }
                    ]
                }
            },
            "volumeMounts[/etc/pipelinerl/job]: is the operator's",
        ),
    ],
)
def test_what_the_operator_depends_on_cannot_be_changed(
    template: dict[str, Any], says: str
) -> None:
    assert says in refusal(template)
