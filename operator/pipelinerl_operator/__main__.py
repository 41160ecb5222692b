"""`python -m pipelinerl_operator`: the operator of one Kubernetes cluster."""

import argparse
import asyncio
import gc
import logging
import os
import sys
import uuid
from asyncio.sslproto import SSLProtocol
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_common.service import program, run_service
from pipelinerl_common.telemetry import LEVELS

log = logging.getLogger(__name__)

TLS_BUFFER_BYTES = 32 << 10
"""Bytes that are read from a connection at once; asyncio's 256 kB for each of 15 connections are 4
MB.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. A pod's name and namespace default to its environment."""
    parser = argparse.ArgumentParser(
        prog=program(), description="Runs the PipelineRLJobs of a Kubernetes cluster."
    )
    _add_services(parser)
    _add_images(parser)
    add = parser.add_argument
    add("--lease", default="pipelinerl", help="name of the lease that the replicas share")
    only = "serve only the jobs of this namespace; may be repeated"
    add("--namespace", dest="namespaces", action="append", default=[], help=only)
    add("--no-network-policy", action="store_true", help="create no NetworkPolicy for jobs")
    own = "key=value, a label of the operator's own pods; may be repeated"
    add("--operator-label", action="append", default=[], help=own)
    add("--kubeconfig", type=Path, help="outside of a cluster; else $KUBECONFIG or ~/.kube/config")
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    files = "folder with token, ca.crt and namespace, in a cluster"
    add("--service-account", type=Path, default=account, help=files)
    add("--workers", type=int, default=4, help="jobs that are reconciled at the same time")
    resync = "time after which every job is reconciled again"
    add("--resync-seconds", type=float, default=600.0, help=resync)
    name, namespace = os.environ.get("POD_NAME", ""), os.environ.get("POD_NAMESPACE", "")
    add("--pod-name", default=name, help="name of this replica's pod; default $POD_NAME")
    add("--pod-namespace", default=namespace, help="its namespace; default $POD_NAMESPACE")
    add("--log-level", choices=LEVELS, default="info")
    return parser.parse_args(argv)


def _add_services(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    address = "host:port of the weight-transfer coordinator for pods"
    add("--coordinator", required=True, help=address)
    served = "host:port on which the leader serves the coordinator"
    add("--coordinator-listen", default="0.0.0.0:50052", help=served)
    add("--nats-url", required=True, help="URL of the stream server for pods")
    login = parser.add_mutually_exclusive_group()
    secret = "Secret with the server's keys: every job has an account of its own"
    login.add_argument("--nats-auth-secret", default="", help=secret)
    shared = "file with one login for the operator and all jobs"
    login.add_argument("--nats-credentials", type=Path, help=shared)
    authority = "CA certificates of a tls:// server, for the operator and all jobs"
    add("--nats-ca-file", type=Path, help=authority)
    probes = "host:port of /metrics, /healthz and /readyz"
    add("--metrics-listen", default="0.0.0.0:8080", help=probes)


def _add_images(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--actor-image", required=True, help="image of actors, references and evaluators")
    add("--trainer-image", required=True, help="image of trainers")
    add("--preprocessor-image", required=True, help="image of the preprocessor")
    policies = ["Always", "IfNotPresent", "Never"]
    add("--image-pull-policy", choices=policies, help="pull policy of all images of jobs")
    secrets = "pull Secret in addition to each job's own; may be repeated"
    add("--image-pull-secret", dest="image_pull_secrets", action="append", default=[], help=secrets)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    identity = f"{arguments.pod_name or os.uname().nodename}_{uuid.uuid4()}"

    async def serve(stop: asyncio.Event) -> None:
        # Imports gRPC and the API client, which --help does not need.
        from pipelinerl_operator.controller.leader import serve_operator

        SSLProtocol.max_size = TLS_BUFFER_BYTES
        # Modules are never garbage: without them the garbage collector runs much sooner.
        gc.freeze()
        await serve_operator(arguments, identity, stop)

    return run_service(serve, name="operator", log_level=arguments.log_level)


if __name__ == "__main__":
    sys.exit(main())
