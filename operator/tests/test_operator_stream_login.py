"""The Secret with the keys of NATS: made once, agreed on by all replicas, never replaced; and the
other ways to log in.
"""

import argparse
from pathlib import Path

import pytest

from pipelinerl_common.errors import SettingsError
from pipelinerl_operator.controller.streams import stream_admin
from pipelinerl_operator.kube.errors import AlreadyExists, NotFound
from pipelinerl_operator.kube.resources import Object, Resource
from pipelinerl_operator.nats import trust
from pipelinerl_operator.nats.streams import AccountStreams, SharedStreams
from pipelinerl_operator.nats.trust import KeyKind, NatsKey

SECRET = "release-nats-auth"
URL = "nats://127.0.0.1:1"


class Secrets:
    """As much of the API as is needed here, with the objects in a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.writes = 0
        self.made_by_another: Object | None = None

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if name not in self.objects:
            raise NotFound(name)
        return self.objects[name]

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, dry_run: bool = False
    ) -> Object:
        name = body["metadata"]["name"]
        if self.made_by_another is not None:
            self.objects[name] = self.made_by_another
            raise AlreadyExists(name)
        self.writes += 1
        self.objects[name] = body
        return body


def arguments(secret: str = SECRET, credentials: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        nats_url=URL, nats_auth_secret=secret, nats_credentials=credentials, nats_ca_file=None
    )


async def operator_of(api: Secrets) -> NatsKey:
    async with stream_admin(arguments(), api, "system") as admin:  # type: ignore[arg-type] # a part of the API
        assert isinstance(admin, AccountStreams)
        return admin._operator


async def test_the_keys_are_made_once_and_read_from_then_on() -> None:
    api = Secrets()
    first = await operator_of(api)
    assert await operator_of(api) == first
    assert api.writes == 1
    assert api.objects[SECRET]["data"].keys() == {
        trust.SEED_KEY,
        trust.CONFIG_KEY,
        trust.ROUTE_PASSWORD_KEY,
    }


async def test_the_replica_that_comes_second_takes_what_the_first_has_made() -> None:
    api = Secrets()
    other = NatsKey.generate(KeyKind.OPERATOR)
    api.made_by_another = trust.auth_secret(SECRET, other, {})
    assert await operator_of(api) == other
    assert api.writes == 0


async def test_a_secret_without_a_seed_is_named_and_never_replaced() -> None:
    api = Secrets()
    api.objects[SECRET] = {"metadata": {"name": SECRET}, "data": {}}
    with pytest.raises(SettingsError, match=r"release-nats-auth: has no key operator\.seed"):
        await operator_of(api)
    assert api.writes == 0


async def test_a_server_of_somebody_elses_takes_one_login_for_everybody(tmp_path: Path) -> None:
    api, login = Secrets(), tmp_path / "login"
    login.write_text("user:password\n")
    for file in (login, None):  # with a login, or on a server that asks for none
        async with stream_admin(arguments("", file), api, "system") as admin:  # type: ignore[arg-type]
            assert isinstance(admin, SharedStreams)
    with pytest.raises(SettingsError, match=r"--nats-credentials .*nowhere: cannot be read"):
        async with stream_admin(arguments("", tmp_path / "nowhere"), api, "system"):  # type: ignore[arg-type]
            pass
