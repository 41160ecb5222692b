"""What nats-server trusts: the Secret `<release>-nats-auth`, made once, from which everything else
is derived.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from pipelinerl_common.errors import SettingsError
from pipelinerl_operator.nats.claims import (
    Rights,
    account_token,
    credentials,
    operator_token,
    user_token,
)
from pipelinerl_operator.nats.keys import KeyKind, NatsKey

SEED_KEY: Final = "operator.seed"
"""For the operator alone."""
CONFIG_KEY: Final = "auth.conf"
"""For nats-server's configuration to include."""
ROUTE_PASSWORD_KEY: Final = "route.password"
"""For the servers of one cluster among themselves."""

TIMELESS: Final = 0
"""Issue time of what must be the same text whenever it is signed."""

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
"""What the operator does with the system account."""


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
    """The Secret. The same key gives the same content."""
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
    """The key in such a Secret. Raises SettingsError when it has none."""
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
    """Through which the server is administered."""
    return operator.derive(KeyKind.ACCOUNT, "system")
