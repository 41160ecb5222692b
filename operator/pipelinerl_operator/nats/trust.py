"""Keys, tokens and what nats-server trusts: everything derives from one Secret,
`<release>-nats-auth`.

Keys are NKEYs: ed25519 key pairs in NATS's own encoding. Tokens are JSON web tokens with the
algorithm
`ed25519-nkey` and claims of version 2 under `nats`, see
https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt
"""

import base64
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Any, Final

import nkeys

from pipelinerl_common.errors import SettingsError


class KeyKind(IntEnum):
    """Kinds of keys, by the prefix byte of their encoding: "O...", "A...", "U..."."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


@dataclass(frozen=True, repr=False)
class NatsKey:
    """A key pair.

    Example: seed "SUAM...", public "UDXU...".
    """

    seed: str

    @classmethod
    def generate(cls, kind: KeyKind) -> "NatsKey":
        return cls.from_bytes(kind, secrets.token_bytes(32))

    @classmethod
    def from_bytes(cls, kind: KeyKind, raw: bytes) -> "NatsKey":
        """The key of the 32 bytes of an ed25519 seed."""
        return cls(nkeys.encode_seed(raw, kind).decode())

    @classmethod
    def parse(cls, seed: str, kind: KeyKind) -> "NatsKey":
        """Parses a seed. Raises SettingsError when it is not the seed of a key of that kind."""
        try:
            prefix, _ = nkeys.decode_seed(seed.encode())
        except (nkeys.NkeysError, UnicodeEncodeError) as error:
            raise SettingsError(
                f"NATS seed: {error}; restore the Secret or delete it to have new keys made"
            ) from error
        if prefix != kind:
            raise SettingsError(
                f"NATS seed: not of the kind {kind.name.lower()}; restore the Secret or delete it"
            )
        return cls(seed)

    @property
    def public(self) -> str:
        return str(nkeys.from_seed(self.seed.encode()).public_key.decode())

    def sign(self, data: bytes) -> bytes:
        return bytes(nkeys.from_seed(self.seed.encode()).sign(data))

    def derive(self, kind: KeyKind, *path: str) -> "NatsKey":
        """Derives the key of `path`: HMAC-SHA256 keyed with the seed, which cannot be inverted."""
        name = "\0".join((kind.name, *path)).encode()
        return NatsKey.from_bytes(kind, hmac.digest(self.seed.encode(), name, sha256))


UNLIMITED = -1
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_CORE_LIMITS = {"subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED}


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """JetStream limits of one account."""

    num_streams: int
    num_consumers: int
    disk_bytes: int
    """Bytes of all replicas together."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a user may publish to and subscribe to, with NATS's wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def operator_token(operator: NatsKey, system_account: str, issued_at: int) -> str:
    """The operator's own token, which makes the server trust what the operator signs."""
    claims = {"system_account": system_account, "type": "operator", "version": 2}
    return sign(operator, operator.public, "pipelinerl", claims, issued_at)


def account_token(
    operator: NatsKey, account: str, name: str, limits: StreamLimits | None, issued_at: int
) -> str:
    """Token of an account without imports, exports and leaf nodes; JetStream only with `limits`."""
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
    """Token of a user of `account`. It does not expire: it is valid as long as the account."""
    claims = {
        "pub": {"allow": list(rights.publish)},
        "sub": {"allow": list(rights.subscribe)},
        **_CORE_LIMITS,
        "type": "user",
        "version": 2,
    }
    return sign(account, user, name, claims, issued_at)


def deletion_token(operator: NatsKey, accounts: Iterable[str], issued_at: int) -> str:
    """Token that orders the server to delete accounts."""
    claims = {"accounts": list(accounts), "type": "generic", "version": 2}
    return sign(operator, operator.public, "pipelinerl", claims, issued_at)


def credentials(token: str, user: NatsKey) -> str:
    """Text of a credentials file, as `nsc` writes it."""
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
    """Signs a token; equal arguments give equal tokens. Times are in seconds since 1970."""
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
    """The claims of a token, without a check of its signature. Raises ValueError."""
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


SEED_KEY: Final = "operator.seed"
"""Key of the Secret that only the operator reads."""
CONFIG_KEY: Final = "auth.conf"
"""Key of the Secret that nats-server's configuration includes."""
ROUTE_PASSWORD_KEY: Final = "route.password"
"""Key of the Secret with the password between the servers of one cluster."""

TIMELESS: Final = 0
"""Issue time of tokens that must be equal whenever they are signed."""

ADMINISTRATION: Final = Rights(
    publish=(
        "$SYS.REQ.CLAIMS.LIST",
        "$SYS.REQ.CLAIMS.UPDATE",
        "$SYS.REQ.CLAIMS.DELETE",
        "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP",
        "$SYS.REQ.SERVER.PING.JSZ",
        "$JS.API.ACCOUNT.PURGE.*",
    ),
    subscribe=("_INBOX.>",),
)
"""Rights of the operator's own user in the system account."""


def server_trust(operator: NatsKey) -> dict[str, Any]:
    """nats-server's settings `operator`, `system_account` and `resolver_preload`."""
    system = system_account(operator).public
    return {
        "operator": operator_token(operator, system, TIMELESS),
        "system_account": system,
        "resolver_preload": {system: account_token(operator, system, "SYS", None, TIMELESS)},
    }


def administration_credentials(operator: NatsKey) -> str:
    """Credentials of the operator's own user in the system account."""
    system = system_account(operator)
    user = system.derive(KeyKind.USER, "pipelinerl-operator")
    return credentials(
        user_token(system, user.public, "pipelinerl-operator", ADMINISTRATION, TIMELESS), user
    )


def auth_secret(name: str, operator: NatsKey, labels: Mapping[str, str]) -> dict[str, Any]:
    """The Secret with the operator's key; equal keys give equal Secrets."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels)},
        "type": "Opaque",
        "data": {
            key: base64.b64encode(value.encode()).decode()
            for key, value in _content(operator).items()
        },
    }


def operator_key(secret: Mapping[str, Any]) -> NatsKey:
    """The operator's key in a Secret made by `auth_secret`. Raises SettingsError without one."""
    name = secret["metadata"]["name"]
    encoded = (secret.get("data") or {}).get(SEED_KEY)
    if encoded is None:
        raise SettingsError(
            f"Secret {name}: has no key {SEED_KEY}; restore it, or delete the Secret to have new "
            "keys made"
        )
    try:
        seed = base64.b64decode(encoded, validate=True).decode().strip()
        return NatsKey.parse(seed, KeyKind.OPERATOR)
    except (ValueError, SettingsError) as error:
        raise SettingsError(f"Secret {name}, key {SEED_KEY}: {error}") from error


def _content(operator: NatsKey) -> dict[str, str]:
    return {
        SEED_KEY: operator.seed,
        CONFIG_KEY: "".join(
            f"{key}: {json.dumps(value)}\n" for key, value in server_trust(operator).items()
        ),
        ROUTE_PASSWORD_KEY: operator.derive(KeyKind.USER, "routes").seed,
    }


def system_account(operator: NatsKey) -> NatsKey:
    """Key of the account through which the server is administered."""
    return operator.derive(KeyKind.ACCOUNT, "system")
