"""NKEYs: ed25519 key pairs in NATS's own encoding, all derived from the operator's seed."""

import hmac
import secrets
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

import nkeys

from pipelinerl_common.errors import SettingsError


class KeyKind(IntEnum):
    """The prefix byte, by which a key says what it is: "O...", "A...", "U..."."""

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
        """From the 32 bytes of an ed25519 seed."""
        return cls(nkeys.encode_seed(raw, kind).decode())

    @classmethod
    def parse(cls, seed: str, kind: KeyKind) -> "NatsKey":
        """Raises SettingsError when `seed` is not the seed of such a key."""
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
        """The key of `path` below this one: HMAC-SHA256 keyed with the seed, which cannot be found
        from what it derives.
        """
        name = "\0".join((kind.name, *path)).encode()
        return NatsKey.from_bytes(kind, hmac.digest(self.seed.encode(), name, sha256))
