"""Accounts per job on a real nats-server in operator mode: apart from one another, bounded,
durable, and gone with the job.
"""

import asyncio
import base64
import gc
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client, RawCredentials
from operator_harness import StreamState, observe

from pipelinerl.v1 import metrics_pb2
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import API_VERSION, KIND
from pipelinerl_common.stream import Login, NatsServer, Stream, StreamLayout, connect
from pipelinerl_common.stream.server import find_binary
from pipelinerl_operator.nats import trust
from pipelinerl_operator.nats import trust as claims
from pipelinerl_operator.nats.streams import (
    AccountStreams,
    SharedStreams,
    _job_credentials,
)
from pipelinerl_operator.nats.trust import KeyKind, NatsKey, StreamLimits
from pipelinerl_operator.objects.job_resource import JobResource

DEADLINE_S = 60.0
OPERATOR = NatsKey.from_bytes(KeyKind.OPERATOR, bytes(range(32)))


def make_job(
    name: str = "maths", namespace: str = "team", uid: str = "1", max_bytes: int = 1 << 20
) -> JobResource:
    return JobResource.parse(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "generation": 1},
            "spec": {
                "model": {"uri": "tiny", "maxModelLen": 64},
                "task": {"path": "tasks:Task", "sampling": {"maxTokens": 8}},
                "stream": {"maxBytes": max_bytes},
                "weightTransfer": {"backend": "gloo"},
            },
        }
    )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer.start(tmp_path / "nats", trust=trust.server_trust(OPERATOR)) as running:
        yield running


@pytest.fixture
async def streams(server: NatsServer) -> AsyncIterator[AccountStreams]:
    async with AccountStreams.open(server.url, OPERATOR) as opened:
        yield opened


def open_stream(url: str, job: JobResource, credentials: str, timeout_s: float = DEADLINE_S):  # type: ignore[no-untyped-def]
    login = Login(credentials_text=credentials)
    return connect(
        url,
        job.name,
        job.spec.stream,
        name="test",
        namespace=job.namespace,
        login=login,
        timeout_s=timeout_s,
    )


async def raw_client(url: str, credentials: str, errors: list[str]) -> Client:
    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    return await nats.connect(url, user_credentials=RawCredentials(credentials), error_cb=on_error)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)


def record(step: int) -> metrics_pb2.MetricsRecord:
    return metrics_pb2.MetricsRecord(schema_version=1, job="maths", role="trainer", step=step)


async def test_a_jobs_services_do_everything_they_need_with_its_credentials(
    server: NatsServer, streams: AccountStreams
) -> None:
    job = make_job()
    assert await observe(streams, job) is None
    async with (
        open_stream(server.url, job, await streams.ensure(job)) as stream,
        asyncio.timeout(DEADLINE_S),
    ):
        await publish(stream, b"payload")
        journal = await stream.journal()
        await journal.put("groups/0-0", b"x")
        assert await journal.entries() == {"groups/0-0": b"x"}
        await journal.delete("groups/0-0")
        assert await journal.entries() == {}
        await stream.publish_metrics(record(1))
        async with stream.metrics() as records:
            assert (await anext(records)).step == 1
        status = await observe(streams, job)
        assert status is not None
        assert status.pending == 1
        assert 0 <= status.oldest_seconds < DEADLINE_S
        async with stream.samples(max_pending=1):
            await until(lambda: stream.counters["set_aside_unparsable"] == 1)
            while (await observe(streams, job)) != StreamState(0, 0.0):  # noqa: ASYNC110 - acknowledged, it leaves the stream
                await asyncio.sleep(0.02)


async def publish(stream: Stream, payload: bytes) -> None:
    """A malformed sample: what matters here is where it goes."""
    await stream._connection.publish(stream._layout.subject("samples"), payload, None, DEADLINE_S)


async def test_one_job_neither_sees_nor_reaches_another(
    server: NatsServer, streams: AccountStreams
) -> None:
    mine, other = (
        make_job("maths", "team", "1"),
        make_job("maths", "team", "2"),
    )  # even under the same names
    async with open_stream(server.url, mine, await streams.ensure(mine)) as stream:
        await publish(stream, b"mine")
        async with open_stream(server.url, other, await streams.ensure(other)) as other_stream:
            assert (await other_stream.depth()).num_messages == 0
            await publish(other_stream, b"theirs")
            await publish(other_stream, b"theirs too")
        assert (await stream.depth()).num_messages == 1
    first, second = await observe(streams, mine), await observe(streams, other)
    assert first is not None
    assert second is not None
    assert (first.pending, second.pending) == (1, 2)


async def test_credentials_allow_the_jobs_own_subjects_only(
    server: NatsServer, streams: AccountStreams
) -> None:
    errors: list[str] = []
    client = await raw_client(server.url, await streams.ensure(make_job()), errors)
    try:
        for subject in ("team.other.samples", "anything", "$SYS.REQ.CLAIMS.LIST"):
            await client.publish(subject, b"")
        await client.subscribe(">")
        await client.flush()
        await until(lambda: len(errors) == 4)
        assert all("permissions violation" in error.lower() for error in errors)
    finally:
        await client.close()


async def test_the_operators_own_login_administers_and_nothing_else(server: NatsServer) -> None:
    errors: list[str] = []
    client = await raw_client(server.url, trust.administration_credentials(OPERATOR), errors)
    try:
        await client.publish("$SYS.REQ.SERVER.ABCDEF.RELOAD", b"")
        await client.subscribe("$SYS.>")
        await client.flush()
        await until(lambda: len(errors) == 2)
    finally:
        await client.close()


async def test_a_job_has_no_more_disk_than_its_settings_say(
    server: NatsServer, streams: AccountStreams
) -> None:
    job = make_job()
    credentials = await streams.ensure(job)
    greedy = make_job(max_bytes=1 << 30)
    with pytest.raises(SettingsError, match=r"stream\.maxBytes=1073741824: .*lower it"):
        async with open_stream(server.url, greedy, credentials):
            pass
    client = await raw_client(server.url, credentials, [])
    try:
        jetstream = client.jetstream()
        with pytest.raises(nats.js.errors.APIError, match="max bytes"):
            await jetstream.add_stream(name="own", subjects=["team.maths.samples"])
        with pytest.raises(nats.js.errors.APIError):
            await jetstream.add_stream(
                name="own", subjects=["team.maths.samples"], max_bytes=1 << 40
            )
    finally:
        await client.close()
    assert (
        await streams.ensure(greedy) == credentials
    )  # the spec has more now: same login, wider limits
    async with open_stream(server.url, greedy, credentials):
        pass


async def test_a_job_that_finds_no_room_is_told_what_it_wants_and_gets_it_when_there_is_some(
    tmp_path: Path,
) -> None:
    one, two = (
        make_job(uid="1", max_bytes=100 << 20),
        make_job(uid="2", max_bytes=100 << 20),
    )  # and 768 MiB each
    small = {
        **trust.server_trust(OPERATOR),
        "jetstream": {"store_dir": str(tmp_path), "max_file_store": 1 << 30},
    }
    async with (
        NatsServer.start(tmp_path / "nats", trust=small) as server,
        AccountStreams.open(server.url, OPERATOR) as streams,
    ):
        async with open_stream(server.url, one, await streams.ensure(one)):
            pass
        for _ in range(2):
            with pytest.raises(
                Unavailable,
                match=r"no room for the streams.*reserve 910163968 bytes.*spec\.stream\.maxBytes",
            ):
                await streams.ensure(two)
        assert await streams.remove(one)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    credentials = await streams.ensure(two)
                    break
                except Unavailable:  # a purge takes its time
                    await asyncio.sleep(0.5)
        async with open_stream(server.url, two, credentials):
            pass


async def test_a_service_without_streams_on_its_server_says_so(tmp_path: Path) -> None:
    job = make_job()
    async with (
        NatsServer.start(
            tmp_path / "nats", trust=trust.server_trust(OPERATOR) | {"jetstream": False}
        ) as server,
        AccountStreams.open(server.url, OPERATOR) as streams,
    ):
        account = streams._account(job)
        await streams._server.ensure(account.public, "x", StreamLimits(4, 4, 1 << 20))
        with pytest.raises(Unavailable, match=r"gives no streams within 3 s.*has its store room"):
            async with open_stream(server.url, job, _job_credentials(job, account), timeout_s=3.0):
                pass


async def test_a_restarted_server_still_knows_accounts_and_what_is_on_their_streams(
    tmp_path: Path,
) -> None:
    job = make_job()
    async with NatsServer.start(tmp_path / "nats", trust=trust.server_trust(OPERATOR)) as server:
        async with AccountStreams.open(server.url, OPERATOR) as streams:
            credentials = await streams.ensure(job)
        async with open_stream(server.url, job, credentials) as stream:
            await publish(stream, b"x")
    async with (
        NatsServer.start(
            tmp_path / "nats", trust=trust.server_trust(OPERATOR)
        ) as again,  # and no operator in sight
        open_stream(again.url, job, credentials) as stream,
    ):
        assert (await stream.depth()).num_messages == 1


@pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_lost_its_disk_is_told_again_while_services_wait(
    tmp_path: Path,
) -> None:
    job = make_job()
    async with AsyncExitStack() as stack:
        async with NatsServer.start(tmp_path / "one", trust=trust.server_trust(OPERATOR)) as server:
            streams = await stack.enter_async_context(AccountStreams.open(server.url, OPERATOR))
            login = Login(credentials_text=await streams.ensure(job))
            opening = connect(
                server.url, "maths", job.spec.stream, name="test", namespace="team", login=login
            )
            stream = await stack.enter_async_context(opening)
        await until(lambda: not stream.is_connected)
        async with NatsServer.start(
            tmp_path / "two", server.port, trust=trust.server_trust(OPERATOR)
        ):
            await until(lambda: stream.is_connected)
            assert (await stream.depth()).num_messages == 0
            status = await observe(streams, job)
            assert status == StreamState(0, 0.0)
    gc.collect()  # the client library drops the connection of a refused login unclosed


async def test_a_removed_job_leaves_nothing_and_its_services_are_shut_out(
    server: NatsServer, streams: AccountStreams, tmp_path: Path
) -> None:
    job, stays = make_job(uid="1"), make_job("other", uid="2")
    credentials, others = await streams.ensure(job), await streams.ensure(stays)
    async with open_stream(server.url, stays, others) as other_stream:
        await publish(other_stream, b"x")
        async with open_stream(server.url, job, credentials) as stream:
            await publish(stream, b"x")
            assert len(list((tmp_path / "nats" / "jetstream").glob("*"))) == 2
            assert await streams.remove(job)
            await until(lambda: len(list((tmp_path / "nats" / "jetstream").glob("*"))) == 1)
            await until(lambda: not stream.is_connected)
        assert (
            len(list((tmp_path / "nats" / "accounts").glob("*"))) == 2
        )  # the system's and the other's
        assert (await other_stream.depth()).num_messages == 1
    assert await streams.remove(job)  # a second time is no error
    with pytest.raises(Unavailable, match="refuses the credentials"):
        async with open_stream(server.url, job, credentials, timeout_s=8.0):
            pass


async def test_what_nobody_saw_go_is_swept_and_other_namespaces_are_left_alone(
    server: NatsServer, streams: AccountStreams
) -> None:
    stays, gone, elsewhere = (
        make_job(uid="1"),
        make_job(uid="2"),
        make_job(namespace="other", uid="3"),
    )
    for job in (stays, gone, elsewhere):
        async with open_stream(server.url, job, await streams.ensure(job)) as stream:
            await publish(stream, b"x")
    assert await streams.sweep(lambda: ["1"], ["team"]) == 1
    assert await observe(streams, gone) is None
    assert await observe(streams, stays) is not None
    assert await observe(streams, elsewhere) is not None
    assert await streams.sweep(lambda: ["1"], []) == 1
    assert await observe(streams, elsewhere) is None
    assert await streams.sweep(lambda: ["1"], []) == 0
    await streams._server.ensure(
        OPERATOR.derive(KeyKind.ACCOUNT, "old").public, "SYS", StreamLimits(1, 1, 1)
    )
    assert await streams.sweep(lambda: ["1"], []) == 0  # whatever it is, it is no job's


async def test_a_removed_account_may_come_back(server: NatsServer, streams: AccountStreams) -> None:
    job = make_job()
    credentials = await streams.ensure(job)
    await streams.remove(job)
    await asyncio.sleep(1.1)  # issue times of tokens are whole seconds
    assert await streams.ensure(job) == credentials
    async with open_stream(server.url, job, credentials) as stream:
        assert (await stream.depth()).num_messages == 0


async def test_an_operator_without_memory_changes_nothing(
    server: NatsServer, streams: AccountStreams, tmp_path: Path
) -> None:
    job = make_job()
    credentials = await streams.ensure(job)
    account = next(path for path in (tmp_path / "nats" / "accounts").glob("*.jwt") if _is_job(path))
    before = account.read_text()
    async with AccountStreams.open(server.url, OPERATOR) as another:
        assert await another.ensure(job) == credentials
    assert account.read_text() == before


def _is_job(path: Path) -> bool:
    return str(claims.read_claims(path.read_text())["name"]) == "team/maths"


async def test_expired_credentials_are_named_with_the_remedy(
    server: NatsServer, streams: AccountStreams, tmp_path: Path
) -> None:
    job = make_job()
    await streams.ensure(job)
    account = OPERATOR.derive(KeyKind.ACCOUNT, "job", job.uid)
    user = account.derive(KeyKind.USER, "late")
    rights = {
        "pub": {},
        "sub": {},
        "subs": -1,
        "data": -1,
        "payload": -1,
        "type": "user",
        "version": 2,
    }
    token = claims.sign(account, user.public, "late", rights, 1, expires_at=int(time.time()) - 60)
    path = tmp_path / "nats.creds"
    path.write_text(claims.credentials(token, user))
    with pytest.raises(
        Unavailable,
        match=r"refuses the credentials in .*nats\.creds: they are expired.*--nats-credentials",
    ):
        async with connect(
            server.url,
            "maths",
            job.spec.stream,
            name="t",
            login=Login.from_file(path),
            timeout_s=8.0,
        ):
            pass


async def test_a_server_is_known_by_its_certificate(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    subject = ("-subj", "/CN=nats", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    files = ("-nodes", "-keyout", str(key), "-out", str(certificate))
    command = ["openssl", "req", "-x509", "-newkey", "ed25519", *files, *subject]
    await asyncio.to_thread(
        subprocess.run, command, check=True, capture_output=True, timeout=DEADLINE_S
    )
    settings = {"tls": {"cert_file": str(certificate), "key_file": str(key)}}
    job = make_job()
    async with NatsServer.start(
        tmp_path / "nats", trust={**trust.server_trust(OPERATOR), **settings}
    ) as server:
        url = f"tls://127.0.0.1:{server.port}"
        async with AccountStreams.open(url, OPERATOR, ca_file=certificate) as streams:
            credentials = await streams.ensure(job)
        login = Login(credentials_text=credentials, ca_file=certificate)
        async with connect(
            url, "maths", job.spec.stream, name="test", namespace="team", login=login
        ) as stream:
            assert (await stream.depth()).num_messages == 0
        with pytest.raises(Unavailable, match=r"(?i)certificate verify failed"):
            async with open_stream(url, job, credentials, timeout_s=4.0):
                pass
    with pytest.raises(SettingsError, match=r"--nats-ca-file .*nowhere"):
        async with AccountStreams.open(url, OPERATOR, ca_file=tmp_path / "nowhere"):
            pass


async def test_without_a_server_every_call_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl_operator.nats.server._ANSWER_S", 0.3)
    job = make_job()
    async with (
        AccountStreams.open("nats://127.0.0.1:1", OPERATOR) as streams,
        asyncio.timeout(DEADLINE_S),
    ):
        with pytest.raises(Unavailable, match=r"no connection to nats://127\.0\.0\.1:1"):
            await streams.ensure(job)
        with pytest.raises(Unavailable, match="no connection to"):
            await observe(streams, job, 0.3)
        assert not await streams.remove(job)


async def test_a_server_that_trusts_another_operator_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipelinerl_operator.nats.server._ANSWER_S", 8.0
    )  # a server looks 2 s for an account
    other = NatsKey.generate(KeyKind.OPERATOR)
    async with (
        NatsServer.start(tmp_path / "nats", trust=trust.server_trust(other)) as server,
        AccountStreams.open(server.url, OPERATOR) as streams,
    ):
        with pytest.raises(Unavailable, match=r"(?i)authorization violation"):
            await streams.ensure(make_job())


async def test_on_a_shared_server_namespaces_keep_jobs_apart(tmp_path: Path) -> None:
    one, two = make_job(namespace="one", uid="1"), make_job(namespace="two", uid="2")
    async with (
        NatsServer.start(tmp_path / "nats", token="secret") as server,
        SharedStreams.open(server.url, "secret") as streams,
    ):
        assert await observe(streams, one) is None
        login = Login.from_text(str(await streams.ensure(one)))
        for job, number in ((one, 1), (two, 2)):
            async with connect(
                server.url,
                job.name,
                job.spec.stream,
                name="test",
                namespace=job.namespace,
                login=login,
            ) as stream:
                for _ in range(number):
                    await publish(stream, b"x")
        first, second = await observe(streams, one), await observe(streams, two)
        assert first is not None
        assert second is not None
        assert (first.pending, second.pending) == (1, 2)
        assert await streams.remove(one)
        assert await streams.remove(one)
        assert await observe(streams, one) is None
        assert (await observe(streams, two)) is not None
        client = await nats.connect(server.url, token="secret")
        assert {info.config.name for info in await client.jetstream().streams_info()} == set(
            StreamLayout("maths", two.spec.stream, "two").streams
        )
        await client.close()


def test_the_secret_can_be_made_again_from_its_seed_and_nothing_else_of_it_is_secret_to_the_server() -> (  # noqa: E501
    None
):
    secret = trust.auth_secret("release-nats-auth", OPERATOR, {"app": "x"})
    assert trust.operator_key(secret) == OPERATOR
    assert (
        trust.auth_secret("release-nats-auth", trust.operator_key(secret), {"app": "x"}) == secret
    )
    config = base64.b64decode(secret["data"][trust.CONFIG_KEY]).decode()
    assert OPERATOR.seed not in config
    assert (
        OPERATOR.public not in base64.b64decode(secret["data"][trust.ROUTE_PASSWORD_KEY]).decode()
    )


def test_the_server_takes_the_secrets_file_as_part_of_its_configuration(tmp_path: Path) -> None:
    secret = trust.auth_secret("s", OPERATOR, {})
    (tmp_path / "auth.conf").write_bytes(base64.b64decode(secret["data"][trust.CONFIG_KEY]))
    (tmp_path / "nats.conf").write_text(
        f'include "auth.conf"\nresolver {{ type: full, dir: "{tmp_path}" }}\n'
    )
    command = [find_binary(), "-t", "--config", str(tmp_path / "nats.conf")]
    checked = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "has no key operator.seed"),
        ({"operator.seed": "!"}, "Secret s, key operator.seed"),
        (
            {"operator.seed": base64.b64encode(b"SOAXXX").decode()},
            "Secret s, key operator.seed: NATS seed",
        ),
        (
            {
                "operator.seed": base64.b64encode(
                    OPERATOR.derive(KeyKind.USER, "x").seed.encode()
                ).decode()
            },
            "not of the kind operator",
        ),
    ],
)
def test_a_secret_that_is_no_such_secret_is_named(data: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        trust.operator_key({"metadata": {"name": "s"}, "data": data})
