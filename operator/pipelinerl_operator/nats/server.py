"""Requests to nats-server: accounts through the system account, streams through JetStream."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
_PAUSE_S: Final = 2.0
_NO_STREAM: Final = 10059
_OF_ONE_SIGNING: Final = ("iat", "jti")


@dataclass(frozen=True, slots=True)
class _Ensured:
    """The state of an account that was last checked."""

    generation: int
    """Generation of the connection on which it was checked."""
    name: str
    limits: StreamLimits


class AccountClient:
    """Accounts of a server in operator mode.

    An account that was checked is not checked again until the connection was lost: then the server
    may have returned without its disk.
    """

    def __init__(self, requests: StreamConnection, operator: NatsKey) -> None:
        self._requests = requests
        self._operator = operator
        self._ensured: dict[str, _Ensured] = {}
        self._unusable: set[str] = set()
        self._reconnected = asyncio.Event()

    @asynccontextmanager
    async def restoring(self) -> AsyncIterator[None]:
        """Restores the accounts on the server after every reconnect while the block runs."""
        async with self._requests.listening(self._reconnected.set):
            task = asyncio.ensure_future(self._restore())
            try:
                yield
            finally:
                await cancel_all([task])

    async def ensure(self, account: str, name: str, limits: StreamLimits) -> bool:
        """Makes the account what is given. True when the server was updated. Raises Unavailable."""
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
        """Marks an account that the server accepted but cannot serve: the next `ensure` sends it
        again, which makes the server look for room again.
        """
        self._ensured.pop(account, None)
        self._unusable.add(account)

    async def _restore(self) -> None:
        """Sends known accounts after each reconnect until cancelled; retries while it fails."""
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for account, known in tuple(self._ensured.items()):
                if account not in self._ensured:
                    continue  # removed meanwhile
                try:
                    await self.ensure(account, known.name, known.limits)
                except Unavailable as error:
                    log.warning("accounts of jobs are not checked, retrying: %s", error)
                    self._reconnected.set()
                    await asyncio.sleep(_PAUSE_S)
                    break

    async def remove(self, account: str) -> None:
        """Removes the account's streams, the account, and what was created in between. Raises
        Unavailable.
        """
        self._ensured.pop(account, None)
        self._unusable.discard(account)
        order = deletion_token(self._operator, [account], int(time.time()))
        # In another order the server keeps counting the streams' bytes as reserved until its
        # restart.
        await self._purge(account)
        _confirmed(await self._requests.ask("$SYS.REQ.CLAIMS.DELETE", order.encode(), _ANSWER_S))
        await self._purge(account)

    async def _purge(self, account: str) -> None:
        answer = await self._requests.ask(f"$JS.API.ACCOUNT.PURGE.{account}", b"", _ANSWER_S)
        _check(json.loads(answer))

    async def accounts(self) -> list[str]:
        """All accounts that the server has, including its own. Raises Unavailable."""
        return list(
            json.loads(await self._requests.ask("$SYS.REQ.CLAIMS.LIST", b"", _ANSWER_S))["data"]
        )

    async def name_of(self, account: str) -> str | None:
        """The account's name, None for an unknown account. Raises Unavailable."""
        found = await self._requests.ask(
            f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"", _ANSWER_S
        )
        return str(read_claims(found.decode())["name"]) if found else None


class StreamClient:
    """Deletes streams in the account of the connection itself."""

    def __init__(self, requests: StreamConnection) -> None:
        self._requests = requests

    async def delete(self, stream: str) -> None:
        """Deletes the stream if it exists. Raises Unavailable."""
        answer = json.loads(
            await self._requests.ask(f"$JS.API.STREAM.DELETE.{stream}", b"", _ANSWER_S)
        )
        if answer.get("error", {}).get("err_code") != _NO_STREAM:
            _check(answer)


def _says_the_same(found: str, wanted: str) -> bool:
    """Whether two tokens differ only in when they were signed."""
    try:
        return _meaning(found) == _meaning(wanted)
    except ValueError:  # empty: the account is not known yet
        return False


def _meaning(token: str) -> dict[str, Any]:
    return {key: value for key, value in read_claims(token).items() if key not in _OF_ONE_SIGNING}


def _confirmed(answer: bytes) -> None:
    """Raises Unavailable unless a claims request was executed."""
    body = json.loads(answer)
    outcome = body.get("data") or body.get("error") or {}
    if outcome.get("code") != 200:
        raise Unavailable(
            "nats-server: "
            f"{outcome.get('description') or outcome.get('message') or answer.decode()}"
        )


def _check(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise Unavailable(f"nats-server: {answer['error'].get('description', answer['error'])}")
