"""Credentials for the stream's server, and the certificates that the server is checked against."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nats.aio.client import RawCredentials

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.service import Wiring

_CREDENTIALS: Final = "-----BEGIN NATS USER JWT-----"
_SEED: Final = "-----BEGIN USER NKEY SEED-----"


@dataclass(frozen=True, slots=True)
class Login:
    """A login at the stream's server: at most one of `token`, `user` with `password`,
    `credentials_file`, `credentials_text`; anonymous without any of them.

    Example: Login(credentials_file=Path("/etc/pipelinerl/nats.creds")).
    """

    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    credentials_file: Path | None = None
    """File with user token and seed, read at every connect."""
    credentials_text: str | None = field(default=None, repr=False)
    """User token and seed, from memory."""
    ca_file: Path | None = None
    """Certificates that the server's own must come from; None trusts what this machine trusts. Only
    for tls:// URLs.
    """

    @classmethod
    def of(cls, wiring: Wiring) -> "Login":
        """The login of `--nats-credentials`, else the job's token. Raises SettingsError for files
        that cannot be used.
        """
        if wiring.nats_credentials is None:
            return cls(token=wiring.token, ca_file=wiring.nats_ca_file)
        return cls.from_file(wiring.nats_credentials, wiring.nats_ca_file)

    @classmethod
    def from_file(cls, path: Path, ca_file: Path | None = None) -> "Login":
        """Reads a credentials file, or a file of one line: `user:password` or a token. Raises
        SettingsError.
        """
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--nats-credentials {path}: cannot be read: {error}") from error
        if _CREDENTIALS in text and _SEED in text:
            return cls(credentials_file=path, ca_file=ca_file)
        return cls.from_text(text, ca_file, what=f"--nats-credentials {path}")

    @classmethod
    def from_text(
        cls, text: str, ca_file: Path | None = None, *, what: str = "NATS credentials"
    ) -> "Login":
        """Parses the content of such a file; `what` names it in errors. Raises SettingsError."""
        text = text.strip()
        if _CREDENTIALS in text and _SEED in text:
            return cls(credentials_text=text + "\n", ca_file=ca_file)
        if not text or "\n" in text or "-----" in text:
            raise SettingsError(
                f"{what}: is neither a NATS credentials file (user JWT and NKEY seed) nor one line "
                "of user:password or token"
            )
        user, separator, password = text.partition(":")
        return (
            cls(user=user, password=password, ca_file=ca_file)
            if separator
            else cls(token=text, ca_file=ca_file)
        )

    @property
    def has_credentials(self) -> bool:
        """Whether a refusal may pass by itself: the server may not know the account yet."""
        return self.credentials_file is not None or self.credentials_text is not None

    @property
    def remedy(self) -> str:
        """What the user can do when the server refuses this login."""
        if self.credentials_file is not None:
            return (
                f"the credentials in {self.credentials_file}: they are expired, or the server does "
                "not know their account; give those that the operator wrote for this job (key "
                "nats.creds of its Secret) with --nats-credentials"
            )
        if self.credentials_text is not None:
            return (
                "the credentials: they are expired or signed by an operator that it does not trust"
            )
        if self.user is not None:
            return (
                f"user {self.user!r} and its password: give the right ones with --nats-credentials"
            )
        return "the token: give the right --token-file"

    def options(self) -> dict[str, Any]:
        """Arguments of the NATS client's `connect`. Raises SettingsError for unreadable
        certificates.
        """
        options: dict[str, Any] = {
            "token": self.token,
            "user": self.user,
            "password": self.password,
        }
        if self.credentials_file is not None:
            options["user_credentials"] = str(self.credentials_file)
        elif self.credentials_text is not None:
            options["user_credentials"] = RawCredentials(self.credentials_text)
        if self.ca_file is not None:
            try:
                options["tls"] = ssl.create_default_context(cafile=str(self.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise SettingsError(
                    f"--nats-ca-file {self.ca_file}: no certificates can be read: {error}"
                ) from error
        return options


ANONYMOUS: Final = Login()
