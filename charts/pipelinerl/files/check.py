"""The checks of `helm test`: the CRD is served, the operator leads and responds, the coordinator's
port is open.
"""

import json
import os
import socket
import ssl
import sys
import time
import urllib.request

DEADLINE = time.monotonic() + 90


def crd_is_served() -> str:
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    with open(f"{folder}/token") as file:
        token = file.read()
    api = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    request = urllib.request.Request(
        f"{api}/apis/pipelinerl.dev/v1alpha1", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(
        request, timeout=5, context=ssl.create_default_context(cafile=f"{folder}/ca.crt")
    ) as answer:
        names = [resource["name"] for resource in json.load(answer)["resources"]]
    assert "pipelinerljobs" in names, names
    return ", ".join(names)


def operator_answers() -> str:
    with urllib.request.urlopen(os.environ["OPERATOR_METRICS"], timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines if line.startswith("pipelinerl_")}
    assert names, "no metric of pipelinerl"
    return f"{len(names)} metrics"


def connects(address: str) -> str:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        return address


def nats_offers_jetstream() -> str:
    url = os.environ["NATS_URL"]
    host, _, port = url.rpartition("/")[2].rpartition("@")[2].rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as connection,
        connection.makefile("r") as lines,
    ):
        info = json.loads(lines.readline().removeprefix("INFO "))
    assert info.get("jetstream"), f"{url} runs without JetStream: the operator needs it"
    return f"{url} version {info['version']}"


CHECKS = {
    "CRD": crd_is_served,
    "operator": operator_answers,
    "coordinator": lambda: connects(os.environ["COORDINATOR"]),
    "NATS": nats_offers_jetstream,
}

failed = 0
for name, check in CHECKS.items():
    while True:
        try:
            print(f"ok    {name}: {check()}", flush=True)
            break
        except (OSError, AssertionError, ValueError, KeyError) as error:
            if time.monotonic() > DEADLINE:
                print(f"WRONG {name}: {error!r}", flush=True)
                failed += 1
                break
            time.sleep(1)
sys.exit(failed)
