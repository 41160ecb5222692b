"""The journal's records as JSON: one for the ledger itself, one per outstanding group."""

import json
from dataclasses import asdict
from typing import Any

from pipelinerl_common.errors import FatalError
from pipelinerl_common.types import GroupId
from pipelinerl_preprocessor.groups import Group, LedgerState

SCHEMA_VERSION = 1


def encode_ledger(state: LedgerState) -> bytes:
    return _encode(asdict(state))


def decode_ledger(key: str, payload: bytes) -> LedgerState:
    """Raises FatalError that names the key when the record cannot be read."""
    try:
        fields = _decode(payload)
        return LedgerState(**{**fields, "last_commit": tuple(fields["last_commit"])})
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(key, error) from error


def encode_group(group: Group) -> bytes:
    """Only what recovery needs: leases are renewed and messages delivered again by themselves."""
    return _encode(
        {
            "group_id": group.group_id,
            "sequence": group.sequence,
            "prompt_index": group.prompt_index,
            "attempt": group.attempt,
            "actor_id": group.actor_id,
            "session_id": group.session_id,
            "started_version": group.started_version,
            **({"traceparent": group.traceparent} if group.traceparent else {}),
        }
    )


def decode_group(key: str, payload: bytes) -> Group:
    """Raises FatalError that names the key when the record cannot be read."""
    try:
        fields = _decode(payload)
        return Group(**{**fields, "group_id": GroupId(fields["group_id"])})
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(key, error) from error


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema_version": SCHEMA_VERSION, **fields}, separators=(",", ":")).encode()


def _decode(payload: bytes) -> dict[str, Any]:
    fields = json.loads(payload)
    if not isinstance(fields, dict) or fields.pop("schema_version", None) != SCHEMA_VERSION:
        raise ValueError(f"schema_version is not {SCHEMA_VERSION}")
    return fields


def _unreadable(key: str, error: Exception) -> FatalError:
    return FatalError(
        f"journal record {key!r} cannot be read ({error}): it was written by another release or "
        "damaged; delete the job's "
        "journal bucket and let the trainer restore from its checkpoint"
    )
