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

from pipelinerl_common.service import run_service
from pipelinerl_common.telemetry import LEVELS

log = logging.getLogger(__name__)

TLS_BUFFER_BYTES = 32 << 10
"""What is read of a connection at once. asyncio's own 256 kB, for each of about fifteen
connections, are 4 MB.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; where this process is, a pod learns from its environment."""
    parser = argparse.ArgumentParser(
        prog="pipelinerl_operator", description="Runs the PipelineRLJobs of a Kubernetes cluster."
    )
    parser.add_argument(
        "--lease", default="pipelinerl", help="name of the lease that the replicas share"
    )
    parser.add_argument(
        "--coordinator",
        required=True,
        help="host:port of the weight-transfer coordinator as pods reach it",
    )
    parser.add_argument(
        "--coordinator-listen",
        default="0.0.0.0:50052",
        help="host:port that the leader serves it on",
    )
    parser.add_argument(
        "--nats-url", required=True, help="URL of the sample stream's server as pods reach it"
    )
    login = parser.add_mutually_exclusive_group()
    login.add_argument(
        "--nats-auth-secret",
        default="",
        help="Secret of the server's keys: every job has an account of its own",
    )
    login.add_argument(
        "--nats-credentials", type=Path, help="file with one login for the operator and all jobs"
    )
    parser.add_argument(
        "--nats-ca-file",
        type=Path,
        help="certificates by which the operator and all jobs trust a tls:// server",
    )
    parser.add_argument(
        "--metrics-listen",
        default="0.0.0.0:8080",
        help="host:port of /metrics, /healthz and /readyz",
    )
    parser.add_argument(
        "--actor-image", required=True, help="image of actors and of the reference model"
    )
    parser.add_argument("--trainer-image", required=True, help="image of trainers")
    parser.add_argument("--preprocessor-image", required=True, help="image of the preprocessor")
    parser.add_argument(
        "--image-pull-policy",
        choices=["Always", "IfNotPresent", "Never"],
        help="of every job's images",
    )
    parser.add_argument(
        "--image-pull-secret",
        dest="image_pull_secrets",
        action="append",
        default=[],
        help="beside each job's own",
    )
    parser.add_argument(
        "--namespace",
        dest="namespaces",
        action="append",
        default=[],
        help="serve only jobs of this one; may be repeated",
    )
    parser.add_argument(
        "--no-network-policy", action="store_true", help="make no NetworkPolicy for jobs"
    )
    parser.add_argument(
        "--operator-label", action="append", default=[], help="key=value of the operator's own pods"
    )
    parser.add_argument(
        "--kubeconfig", type=Path, help="outside of a cluster; else $KUBECONFIG or ~/.kube/config"
    )
    parser.add_argument(
        "--service-account",
        type=Path,
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        help="folder with token, ca.crt and namespace, in a cluster",
    )
    parser.add_argument("--workers", type=int, default=4, help="jobs that are worked on at once")
    parser.add_argument(
        "--resync-seconds",
        type=float,
        default=600.0,
        help="every job is looked at again after this time",
    )
    parser.add_argument(
        "--pod-name",
        default=os.environ.get("POD_NAME", ""),
        help="of this replica; default $POD_NAME",
    )
    parser.add_argument(
        "--pod-namespace",
        default=os.environ.get("POD_NAMESPACE", ""),
        help="default $POD_NAMESPACE",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    identity = f"{arguments.pod_name or os.uname().nodename}_{uuid.uuid4()}"

    async def serve(stop: asyncio.Event) -> None:
        from pipelinerl_operator.controller.leader import (
            serve_operator,
        )  # gRPC and the API client: after --help

        SSLProtocol.max_size = TLS_BUFFER_BYTES
        # modules stay: without them among what may be garbage, a collection of the rest is due much
        # sooner
        gc.freeze()
        await serve_operator(arguments, identity, stop)

    return run_service(serve, name="operator", log_level=arguments.log_level)


if __name__ == "__main__":
    sys.exit(main())
