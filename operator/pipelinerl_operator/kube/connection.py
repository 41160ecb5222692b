"""The address of the API server and this process's credentials: in a cluster from the pod's service
account, elsewhere from a kubeconfig, read by the official client, which knows every kind of it.
"""

import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pipelinerl_common.errors import SettingsError

Value = TypeVar("Value")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REREAD_S = 60.0
"""Time after which credentials are read again: tokens are renewed on disk."""


@dataclass(frozen=True, slots=True)
class ApiConnection:
    """Address and credentials of an API server."""

    server: str
    """URL of the server, for example "https://10.96.0.1:443"."""
    namespace: str
    """Namespace of this process, or of the kubeconfig's context."""
    authorization: Callable[[], str | None]
    """Returns the current value of the Authorization header."""
    tls: Callable[[], ssl.SSLContext | bool]


def find_connection(
    kubeconfig: Path | None = None, service_account: Path = SERVICE_ACCOUNT
) -> ApiConnection:
    """The pod's own connection in a cluster, unless `kubeconfig` is given. Raises SettingsError."""
    if (
        kubeconfig is None
        and "KUBERNETES_SERVICE_HOST" in os.environ
        and (service_account / "token").exists()
    ):
        host, port = (
            os.environ["KUBERNETES_SERVICE_HOST"],
            os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        return in_cluster(f"https://{f'[{host}]' if ':' in host else host}:{port}", service_account)
    return from_kubeconfig(kubeconfig)


def in_cluster(server: str, folder: Path) -> ApiConnection:
    """The connection of the service account whose token, CA and namespace are in `folder`."""
    try:
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        token = _Reread(lambda: (folder / "token").read_text(encoding="utf-8").strip())
        tls = _Reread(lambda: ssl.create_default_context(cafile=str(folder / "ca.crt")))
        token(), tls()
    except OSError as error:
        raise SettingsError(
            f"{folder}: the pod's service account cannot be read: {error}"
        ) from error
    return ApiConnection(server, namespace, lambda: f"Bearer {token()}", tls)


def from_kubeconfig(path: Path | None) -> ApiConnection:
    """The connection of `path`, else $KUBECONFIG, else ~/.kube/config. Raises SettingsError."""
    from kubernetes import config  # 9 MB that a pod does not need

    file = str(path) if path else None
    try:
        client = config.new_client_from_config(config_file=file)
        _, active = config.list_kube_config_contexts(config_file=file)
    except (config.ConfigException, OSError) as error:
        raise SettingsError(
            f"kubeconfig {path or os.environ.get('KUBECONFIG') or '~/.kube/config'}: {error}; give "
            "--kubeconfig or run in a pod"
        ) from error
    configuration = client.configuration

    def authorization() -> str | None:
        for entry in configuration.auth_settings().values():
            if entry.get("key", "").lower() == "authorization" and entry["value"]:
                return str(entry["value"])
        return None

    def tls() -> ssl.SSLContext | bool:
        if not configuration.host.startswith("https"):
            return True
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if not configuration.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        return context

    namespace = (active.get("context") or {}).get("namespace") or "default"
    return ApiConnection(
        str(configuration.host).rstrip("/"), namespace, _Reread(authorization), _Reread(tls)
    )


class _Reread(Generic[Value]):
    """A value that is read again when it is older than REREAD_S, and kept while reading fails."""

    def __init__(self, read: Callable[[], Value]) -> None:
        self._read = read
        self._value = read()
        self._read_at = time.monotonic()

    def __call__(self) -> Value:
        if time.monotonic() - self._read_at > REREAD_S:
            self._read_at = time.monotonic()
            # The file may be being replaced: the server decides whether the old value is valid.
            with suppress(OSError):
                self._value = self._read()
        return self._value
