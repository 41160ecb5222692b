"""One replica of the operator: a candidate for the lease, and what it runs while it leads.

The coordinator's Service finds the leader by a label, which the leader sets on its own pod and
removes from the other pods of its release.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from pipelinerl_common.backoff import Backoff
from pipelinerl_common.errors import PipelineRLError, SettingsError
from pipelinerl_control.plan import Role
from pipelinerl_operator.controller.cluster import ClusterCache, child_resources
from pipelinerl_operator.controller.controller import Controller
from pipelinerl_operator.controller.events import EventRecorder
from pipelinerl_operator.controller.executor import Dependencies
from pipelinerl_operator.controller.job_runtime import job_runtimes
from pipelinerl_operator.controller.streams import JobStreams, read_file, stream_admin
from pipelinerl_operator.controller.telemetry import Telemetry, serve_health
from pipelinerl_operator.kube import (
    Api,
    ApiConnection,
    Election,
    ObjectKey,
    Selection,
    WorkQueue,
    find_connection,
    open_api,
)
from pipelinerl_operator.kube.errors import NotFound
from pipelinerl_operator.kube.resources import PODS, key_of
from pipelinerl_operator.objects import Capabilities, OperatorContext
from pipelinerl_operator.objects.context import Peer
from pipelinerl_operator.objects.names import PREFIX

log = logging.getLogger(__name__)

LEADER = f"{PREFIX}leader"


@asynccontextmanager
async def leader_label(
    api: Api, pod: ObjectKey | None, release: Mapping[str, str]
) -> AsyncIterator[None]:
    """Gives `pod` the leader's label while the block runs, and takes it from the other pods with
    the labels `release`: the namespace may hold other releases.

    Does nothing outside of a cluster, where `pod` is None. Raises PipelineRLError.
    """
    if pod is None:
        yield
        return
    labels = ",".join(f"{key}={value}" for key, value in {**release, LEADER: "true"}.items())
    async for page in api.pages(Selection(PODS, pod.namespace, labels)):
        for other in page.items:
            if key_of(other) != pod:
                await _label(api, key_of(other), None)
    await _label(api, pod, "true")
    try:
        yield
    finally:
        try:
            await _label(api, pod, None)
        except PipelineRLError as error:  # the next leader removes it
            log.warning("pod=%s keeps the leader's label: %s", pod, error)


async def _label(api: Api, pod: ObjectKey, value: str | None) -> None:
    try:
        await api.patch(PODS, pod.namespace, pod.name, {"metadata": {"labels": {LEADER: value}}})
    except NotFound:
        if value is not None:
            raise


FIRST_RETRY_S = 2.0


async def serve_operator(arguments: argparse.Namespace, identity: str, stop: asyncio.Event) -> None:
    """Runs a replica until `stop` is set. Raises SettingsError for wrong arguments or a wrong
    configuration of the connection.
    """
    where = find_connection(arguments.kubeconfig, arguments.service_account)
    replica = _Replica(arguments, identity, where)
    async with (
        open_api(where, replica.telemetry.called) as api,
        # The renewal of the lease must not wait behind other calls.
        open_api(where, replica.telemetry.called, max_calls=1) as for_lease,
        serve_health(
            arguments.metrics_listen, replica.telemetry.exposition, replica.fault
        ) as address,
    ):
        log.info("server=%s metrics=http://%s/metrics", where.server, address)
        replica.election = Election(
            for_lease, ObjectKey(replica.namespace, arguments.lease), identity
        )
        await replica.election.run(lambda: replica.lead(api), stop)


@dataclass
class _Replica:
    """This process as a candidate for the lease."""

    arguments: argparse.Namespace
    identity: str
    where: ApiConnection
    election: Election | None = None
    controller: Controller | None = None

    def __post_init__(self) -> None:
        self.telemetry = Telemetry(lambda: self.election is not None and self.election.is_leader)
        self.namespace = self.arguments.pod_namespace or self.where.namespace

    def fault(self) -> str:
        return self.controller.fault() if self.controller is not None else ""

    async def lead(self, api: Api) -> None:
        """Runs the controller until cancelled, which happens when the lease is lost."""
        arguments = self.arguments
        context = operator_context(arguments, await _capabilities(api), self.namespace)
        pod = ObjectKey(self.namespace, arguments.pod_name) if arguments.pod_name else None
        queue = WorkQueue()
        cluster = ClusterCache(child_resources(context.capabilities.api_versions), queue.add)
        async with (
            stream_admin(arguments, api, self.namespace) as admin,
            job_runtimes(cluster, arguments.coordinator_listen, queue.add) as runtimes,
            leader_label(api, pod, context.operator.labels),
        ):
            streams, recorder = JobStreams(admin), EventRecorder(api, self.identity)
            self.controller = Controller(
                Dependencies(api, cluster, context, runtimes, recorder, streams),
                queue,
                self.telemetry,
                namespaces=arguments.namespaces,
                workers=arguments.workers,
                resync_s=arguments.resync_seconds,
            )
            self.telemetry.watch_runtimes(runtimes.metrics)
            try:
                await self.controller.run()
            finally:
                # Another replica leads from here on: this one must not report its numbers.
                self.controller = None
                self.telemetry.watch_nothing()
                await streams.close()


async def _capabilities(api: Api) -> Capabilities:
    """Asks the server what it offers, until it responds."""
    backoff = Backoff(FIRST_RETRY_S, 30.0)
    while True:
        try:
            _, minor = await api.server_version()
            return Capabilities(minor, await api.api_versions())
        except PipelineRLError as error:
            log.warning("the API server's version: %s", error)
        await backoff.sleep()


def operator_context(
    arguments: argparse.Namespace, capabilities: Capabilities, namespace: str
) -> OperatorContext:
    labels = dict(label.partition("=")[::2] for label in arguments.operator_label)
    if any(not key or not value for key, value in labels.items()):
        raise SettingsError(f"--operator-label {arguments.operator_label}: expected key=value")
    context = OperatorContext(
        images={
            Role.ACTOR: arguments.actor_image,
            Role.REFERENCE: arguments.actor_image,
            Role.EVALUATOR: arguments.actor_image,
            Role.TRAINER: arguments.trainer_image,
            Role.PREPROCESSOR: arguments.preprocessor_image,
        },
        coordinator=arguments.coordinator,
        nats_url=arguments.nats_url,
        capabilities=capabilities,
        image_pull_policy=arguments.image_pull_policy,
        image_pull_secrets=tuple(arguments.image_pull_secrets),
        has_nats_credentials=bool(arguments.nats_auth_secret or arguments.nats_credentials),
        nats_ca=read_file("--nats-ca-file", arguments.nats_ca_file),
        network_policy=not arguments.no_network_policy,
        log_level=arguments.log_level,
    )
    return replace(context, operator=Peer(labels, namespace)) if labels else context
