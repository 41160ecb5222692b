"""How the operator itself gets at the stream's server."""

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipelinerl_common.errors import SettingsError
from pipelinerl_operator.kube import Api
from pipelinerl_operator.kube.errors import AlreadyExists, NotFound
from pipelinerl_operator.kube.resources import SECRETS
from pipelinerl_operator.nats.keys import KeyKind
from pipelinerl_operator.nats.keys import NatsKey as StreamKey
from pipelinerl_operator.nats.streams import AccountStreams, SharedStreams, StreamAdmin
from pipelinerl_operator.nats.trust import auth_secret, operator_key

log = logging.getLogger(__name__)


@asynccontextmanager
async def stream_admin(
    arguments: argparse.Namespace, api: Api, namespace: str
) -> AsyncIterator[StreamAdmin]:
    """Accounts of the chart's own server with --nats-auth-secret, else a shared login, with
    --nats-credentials or with none.

    Raises SettingsError for a Secret or a file that is not what it should be.
    """
    if arguments.nats_auth_secret:
        key = await _operator_key(api, namespace, arguments.nats_auth_secret)
        async with AccountStreams.open(arguments.nats_url, key, arguments.nats_ca_file) as accounts:
            yield accounts
    else:
        login = read_file("--nats-credentials", arguments.nats_credentials)
        async with SharedStreams.open(arguments.nats_url, login, arguments.nats_ca_file) as shared:
            yield shared


def read_file(flag: str, path: Path | None) -> str | None:
    """None without one. Raises SettingsError when it cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{flag} {path}: cannot be read: {error}") from error


async def _operator_key(api: Api, namespace: str, name: str) -> StreamKey:
    """The key in the Secret, which is made once: the stream's server starts when it is there."""
    try:
        return operator_key(await api.get(SECRETS, namespace, name))
    except NotFound:
        key = StreamKey.generate(KeyKind.OPERATOR)
    try:
        await api.create(
            SECRETS, namespace, auth_secret(name, key, {"app.kubernetes.io/part-of": "pipelinerl"})
        )
        log.info("secret=%s/%s made for the stream's server", namespace, name)
        return key
    except AlreadyExists:
        return operator_key(await api.get(SECRETS, namespace, name))
