"""nats-server's own requests: accounts through the system account, streams through JetStream's API."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pipelinerl_common.errors import Unavailable
from pipelinerl_common.service import cancel_all
from pipelinerl_common.stream import StreamConnection
from pipelinerl_operator.nats.trust import (
    NatsKey,
    StreamLimits,
    account_token,
    deletion_token,
    read_claims,
)

log = logging.getLogger(__name__)

_ANSWER_S: Final = 10.0
_LOOK_S: Final = 2.0
_PAUSE_S: Final = 2.0
_NO_STREAM: Final = 10059
_OF_ONE_SIGNING: Final = ("iat", "jti")


@dataclass(frozen=True, slots=True)
class _Ensured:
    generation: int
    """Of the connection on which it was seen to be right."""
    name: str
    limits: StreamLimits


class AccountClient:
    """Accounts of a server in operator mode. What has been seen to be right is not asked for again
    until the connection has been away: the server may then have come back without its disk.
    """

    def __init__(self, requests: StreamConnection, operator: NatsKey) -> None:
        self._requests = requests
        self._operator = operator
        self._ensured: dict[str, _Ensured] = {}
        self._unusable: set[str] = set()
        self._reconnected = asyncio.Event()

    @asynccontextmanager
    async def restoring(self) -> AsyncIterator[None]:
        """While the block runs, tells the server after every reconnect of the accounts that it may
        have forgotten.
        """
        async with self._requests.listening(self._reconnected.set):
            task = asyncio.ensure_future(self._restore_for_ever())
            try:
                yield
            finally:
                await cancel_all([task])

    async def ensure(self, account: str, name: str, limits: StreamLimits) -> bool:
        """True when the server was told something new. Raises Unavailable."""
        state = _Ensured(self._requests.generation, name, limits)
        if self._requests.is_ready and self._ensured.get(account) == state:
            return False
        wanted = account_token(self._operator, account, name, limits, int(time.time()))
        found = await self._requests.ask(
            f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"", _ANSWER_S
        )
        is_news = account in self._unusable or not _says_the_same(found.decode(), wanted)
        if is_news:
            _confirmed(
                await self._requests.ask("$SYS.REQ.CLAIMS.UPDATE", wanted.encode(), _ANSWER_S)
            )
        self._ensured[account] = state
        self._unusable.discard(account)
        return is_news

    def forget(self, account: str) -> None:
        """The server has taken the account and cannot serve it: it is to be told again, with which
        it looks again for room.
        """
        self._ensured.pop(account, None)
        self._unusable.add(account)

    async def _restore_for_ever(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for account, known in tuple(self._ensured.items()):
                if account not in self._ensured:
                    continue  # removed meanwhile
                try:
                    await self.ensure(account, known.name, known.limits)
                except Unavailable as error:
                    log.warning("accounts of jobs are not checked, tried again: %s", error)
                    self._reconnected.set()
                    await asyncio.sleep(_PAUSE_S)
                    break

    async def remove(self, account: str) -> None:
        """Its streams, then the account, then what was made in between. In another order the server
        goes on counting the streams' bytes as reserved, until it is restarted. Raises Unavailable.
        """
        self._ensured.pop(account, None)
        self._unusable.discard(account)
        order = deletion_token(self._operator, [account], int(time.time()))
        await self._purge(account)
        _confirmed(await self._requests.ask("$SYS.REQ.CLAIMS.DELETE", order.encode(), _ANSWER_S))
        await self._purge(account)

    async def _purge(self, account: str) -> None:
        _checked(await self._requests.ask(f"$JS.API.ACCOUNT.PURGE.{account}", b"", _ANSWER_S))

    async def accounts(self) -> list[str]:
        """Every account that the server knows, its own among them. Raises Unavailable."""
        return list(
            json.loads(await self._requests.ask("$SYS.REQ.CLAIMS.LIST", b"", _ANSWER_S))["data"]
        )

    async def name_of(self, account: str) -> str | None:
        """What the account was called when it was made, None for one that is not known. Raises
        Unavailable.
        """
        found = await self._requests.ask(
            f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"", _ANSWER_S
        )
        return str(read_claims(found.decode())["name"]) if found else None

    async def stream_state(self, account: str, stream: str) -> tuple[int, float] | None:
        """Number of messages and age of the oldest in seconds, or None. In a cluster only some
        servers have the stream.
        """
        query = json.dumps({"account": account, "streams": True}).encode()
        answers = await self._requests.ask_all(
            "$SYS.REQ.SERVER.PING.JSZ",
            query,
            is_enough=lambda answers: (
                _find(answers, stream) is not None or len(answers) >= _num_servers(answers[0])
            ),
            timeout_s=_LOOK_S,
        )
        if not answers:
            raise Unavailable(f"no nats-server with JetStream has answered within {_LOOK_S:g} s")
        return _find(answers, stream)


class StreamClient:
    """Streams in the account of the connection itself."""

    def __init__(self, requests: StreamConnection) -> None:
        self._requests = requests

    async def delete(self, stream: str) -> None:
        """Raises Unavailable. A stream that is not there is deleted."""
        await self._ask(f"$JS.API.STREAM.DELETE.{stream}")

    async def state(self, stream: str) -> tuple[int, float] | None:
        """Number of messages and age of the oldest in seconds, or None without the stream. Raises
        Unavailable.
        """
        answer = await self._ask(f"$JS.API.STREAM.INFO.{stream}")
        return None if answer is None else _state(answer["state"], answer["ts"])

    async def _ask(self, subject: str) -> dict[str, Any] | None:
        answer = json.loads(await self._requests.ask(subject, b"", _ANSWER_S))
        if answer.get("error", {}).get("err_code") == _NO_STREAM:
            return None
        return _without_error(answer)


def _says_the_same(found: str, wanted: str) -> bool:
    """Whether two tokens differ only in when they were signed."""
    try:
        return _meaning(found) == _meaning(wanted)
    except ValueError:  # empty: the account is not known yet
        return False


def _meaning(token: str) -> dict[str, Any]:
    return {key: value for key, value in read_claims(token).items() if key not in _OF_ONE_SIGNING}


def _confirmed(answer: bytes) -> None:
    """Raises Unavailable unless a claims request was carried out."""
    body = json.loads(answer)
    outcome = body.get("data") or body.get("error") or {}
    if outcome.get("code") != 200:
        raise Unavailable(
            "nats-server: "
            f"{outcome.get('description') or outcome.get('message') or answer.decode()}"
        )


def _checked(answer: bytes) -> dict[str, Any]:
    return _without_error(json.loads(answer))


def _without_error(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise Unavailable(f"nats-server: {answer['error'].get('description', answer['error'])}")
    return answer


def _num_servers(answer: bytes) -> int:
    cluster = json.loads(answer)["data"].get("meta_cluster") or {}
    return int(cluster.get("cluster_size", 1))


def _find(answers: list[bytes], stream: str) -> tuple[int, float] | None:
    for answer in map(json.loads, answers):
        for account in answer["data"].get("account_details") or ():
            for detail in account.get("stream_detail") or ():
                if detail["name"] == stream:
                    return _state(detail["state"], answer["server"]["time"])
    return None


def _state(state: dict[str, Any], now: str) -> tuple[int, float]:
    messages = int(state["messages"])
    age = (_time(now) - _time(state["first_ts"])).total_seconds() if messages else 0.0
    return messages, max(age, 0.0)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
