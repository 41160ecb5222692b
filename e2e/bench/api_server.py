"""A real Kubernetes API server on loopback with nothing behind it: etcd and kube-apiserver, no
controllers, no kubelets. For the bench of the operator and for its tests.
"""

import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_cli.up.placement import Ports
from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_operator.kube import ApiConnection

BINARIES = (
    Path(os.environ.get("CLUSTER_CACHE", Path.home() / ".cache" / "local-kubernetes")) / "bin"
)
START_S = 240.0
STOP_S = 20.0


@dataclass(frozen=True)
class ApiServer:
    """A running API server with its etcd. `administrator` has every right."""

    administrator: ApiConnection
    folder: Path
    processes: tuple[subprocess.Popen[bytes], ...]
    """etcd and kube-apiserver."""

    def service_account(self) -> tuple[Path, dict[str, str]]:
        """The administrator's rights as a pod has them: a folder with the token, and the
        environment that names the server.
        """
        folder = self.folder / "service-account"
        folder.mkdir(exist_ok=True)
        token = (self.administrator.authorization() or "").removeprefix("Bearer ")
        (folder / "token").write_text(token, encoding="utf-8")
        (folder / "namespace").write_text("default", encoding="utf-8")
        shutil.copy(self.folder / "certs" / "apiserver.crt", folder / "ca.crt")
        host, _, port = self.administrator.server.removeprefix("https://").rpartition(":")
        return folder, {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def as_user(self, token: str) -> ApiConnection:
        """A connection of the user with this token."""
        return ApiConnection(
            self.administrator.server, "default", lambda: f"Bearer {token}", self.administrator.tls
        )


def missing_binary() -> str:
    """The missing program that an API server needs; empty when nothing is missing."""
    if not (BINARIES / "kube-apiserver").exists():
        return f"{BINARIES}/kube-apiserver (e2e/cluster/build makes it)"
    return next(
        (f"{name} on the PATH" for name in ("etcd", "openssl") if shutil.which(name) is None), ""
    )


@contextmanager
def api_server(users: dict[str, str] | None = None) -> Iterator[ApiServer]:
    """Runs an API server until the block is left. `users` are further users' names by token. Raises
    SettingsError when a program is missing, FatalError when the server does not start.
    """
    if missing := missing_binary():
        raise SettingsError(f"no API server can be started: {missing} is missing")
    with tempfile.TemporaryDirectory(prefix="api-server-") as name, Ports() as ports:
        folder = Path(name)
        token = secrets.token_hex(16)
        rows = [
            f"{token},admin,admin,system:masters",
            *(f"{key},{user},{user}" for key, user in (users or {}).items()),
        ]
        (folder / "tokens.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        subprocess.run(
            ["openssl", "genrsa", "-out", folder / "sa.key", "2048"],
            check=True,
            capture_output=True,
        )
        subprocess.run(
            ["openssl", "rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub"],
            check=True,
            capture_output=True,
        )
        etcd_port, peer_port, port = (ports.reserve() for _ in range(3))
        server = f"https://127.0.0.1:{port}"
        etcd = _start(folder, "etcd", _etcd(folder, etcd_port, peer_port))
        api = _start(folder, "kube-apiserver", _kube_apiserver(folder, etcd_port, port))
        try:
            _wait_until_ready(server, folder, (etcd, api))
            tls = ssl.create_default_context(cafile=str(folder / "certs" / "apiserver.crt"))
            yield ApiServer(
                ApiConnection(server, "default", lambda: f"Bearer {token}", lambda: tls),
                folder,
                (etcd, api),
            )
        finally:
            for process in (api, etcd):
                _end(process)


def _etcd(folder: Path, port: int, peer_port: int) -> list[str]:
    clients, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        *("etcd", "--data-dir", str(folder / "etcd"), "--log-level", "warn"),
        *("--listen-client-urls", clients, "--advertise-client-urls", clients),
        *(
            "--listen-peer-urls",
            peers,
            "--initial-advertise-peer-urls",
            peers,
            "--initial-cluster",
            f"default={peers}",
        ),
    ]


def _kube_apiserver(folder: Path, etcd_port: int, port: int) -> list[str]:
    return [
        str(BINARIES / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder / 'certs'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
    ]


def _start(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )


def _wait_until_ready(
    server: str, folder: Path, processes: tuple[subprocess.Popen[bytes], ...]
) -> None:
    deadline = time.monotonic() + START_S
    # The server makes its certificate only now, so there is none yet to verify it by.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    while time.monotonic() < deadline:
        ended = next((process for process in processes if process.poll() is not None), None)
        if ended is not None:
            raise FatalError(
                f"{ended.args!r}: ended with status {ended.returncode}:\n{_last_lines(folder)}"
            )
        with (
            suppress(urllib.error.URLError, OSError),
            opener.open(f"{server}/readyz", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise FatalError(f"the API server was not ready within {START_S:g} s:\n{_last_lines(folder)}")


def _last_lines(folder: Path) -> str:
    logs = [
        path.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        for path in sorted(folder.glob("*.log"))
    ]
    return "\n".join(line for lines in logs for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
