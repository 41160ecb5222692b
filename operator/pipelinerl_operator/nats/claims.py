"""JSON web tokens as NATS wants them: algorithm `ed25519-nkey`, claims of version 2 under `nats`.

Formats: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt
"""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pipelinerl_operator.nats.keys import NatsKey

UNLIMITED = -1
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_CORE_LIMITS = {"subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED}


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one account may have on JetStream."""

    num_streams: int
    num_consumers: int
    disk_bytes: int
    """Of all copies together."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a user may publish to and subscribe to; `*` and `>` as NATS has them."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def operator_token(operator: NatsKey, system_account: str, issued_at: int) -> str:
    """The operator's own token, by which the server trusts what it signs."""
    claims = {"system_account": system_account, "type": "operator", "version": 2}
    return sign(operator, operator.public, "pipelinerl", claims, issued_at)


def account_token(
    operator: NatsKey, account: str, name: str, limits: StreamLimits | None, issued_at: int
) -> str:
    """An account with no imports, no exports and no leaf nodes; without `limits` also without
    JetStream.
    """
    stream = (
        {}
        if limits is None
        else {
            "disk_storage": limits.disk_bytes,
            "streams": limits.num_streams,
            "consumer": limits.num_consumers,
            "max_bytes_required": True,
        }
    )
    claims = {
        "limits": {
            **_CORE_LIMITS,
            "imports": 0,
            "exports": 0,
            "wildcards": False,
            "conn": UNLIMITED,
            "leaf": 0,
            **stream,
        },
        "type": "account",
        "version": 2,
    }
    return sign(operator, account, name, claims, issued_at)


def user_token(account: NatsKey, user: str, name: str, rights: Rights, issued_at: int) -> str:
    """A user of `account`. Without an end: it ends with its account."""
    claims = {
        "pub": {"allow": list(rights.publish)},
        "sub": {"allow": list(rights.subscribe)},
        **_CORE_LIMITS,
        "type": "user",
        "version": 2,
    }
    return sign(account, user, name, claims, issued_at)


def deletion_token(operator: NatsKey, accounts: Iterable[str], issued_at: int) -> str:
    """The order to forget accounts."""
    claims = {"accounts": list(accounts), "type": "generic", "version": 2}
    return sign(operator, operator.public, "pipelinerl", claims, issued_at)


def credentials(token: str, user: NatsKey) -> str:
    """The text of a credentials file, as `nsc` writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


def sign(
    issuer: NatsKey,
    subject: str,
    name: str,
    nats: Mapping[str, Any],
    issued_at: int,
    expires_at: int | None = None,
) -> str:
    """A signed token. The same input gives the same text. Times are in seconds since 1970."""
    claims: dict[str, Any] = {
        "iat": issued_at,
        "iss": issuer.public,
        "name": name,
        "nats": dict(nats),
        "sub": subject,
    }
    if expires_at is not None:
        claims["exp"] = expires_at
    claims["jti"] = base64.b32encode(sha256(_json(claims)).digest()).rstrip(b"=").decode()
    signed = f"{_base64(_json(_HEADER))}.{_base64(_json(claims))}"
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def read_claims(token: str) -> dict[str, Any]:
    """The claims inside a token, its signature unchecked. Raises ValueError for what is no token."""
    parts = token.split(".")
    if len(parts) != 3:
        raise ValueError("a token has three parts")
    claims: dict[str, Any] = json.loads(
        base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
    )
    return claims


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
