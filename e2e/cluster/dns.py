"""Cluster DNS of the local one-node Kubernetes, from the API server's state when a query arrives
(cached for one second).

It resolves `<service>.<namespace>.svc.cluster.local` (the cluster IP, or the endpoints of a
headless service), `<hostname>.<service>.<namespace>.svc.cluster.local` for pods of a headless
service, and SRV records. To a query for the name of an address it replies immediately that there is
none: a process that asks for one (a rendezvous store does) would otherwise wait for seconds.
"""

import argparse
import time
from typing import Any

import kubernetes
from dnslib import QTYPE, RCODE, RR, SRV, A
from dnslib.server import DNSServer

DOMAIN = "svc.cluster.local"
CACHE_S = 1.0


class ClusterResolver:
    """Resolves the names of services and pods from the API server's objects."""

    def __init__(self, kubeconfig: str) -> None:
        kubernetes.config.load_kube_config(kubeconfig)
        self.api = kubernetes.client.CoreV1Api()
        self.cache: dict[tuple[str, str], tuple[float, Any]] = {}

    def service(self, namespace: str, name: str) -> Any:
        """The service and its endpoints, or None."""
        at, found = self.cache.get((namespace, name), (0.0, None))
        if time.monotonic() - at < CACHE_S:
            return found
        try:
            found = (
                self.api.read_namespaced_service(name, namespace, _request_timeout=5),
                self.api.read_namespaced_endpoints(name, namespace, _request_timeout=5),
            )
        except kubernetes.client.ApiException:
            found = None
        self.cache[(namespace, name)] = (time.monotonic(), found)
        return found

    def resolve(self, request: Any, handler: Any) -> Any:
        reply = request.reply()
        name = str(request.q.qname).rstrip(".").lower()
        labels = name.removesuffix("." + DOMAIN).split(".") if name.endswith("." + DOMAIN) else []
        found = self.service(labels[-1], labels[-2]) if len(labels) >= 2 else None
        if found is None:
            reply.header.rcode = RCODE.NXDOMAIN
            return reply
        service, endpoints = found
        prefix, domain = labels[:-2], ".".join((*labels[-2:], DOMAIN))
        addresses = ready_addresses(service, endpoints)
        if request.q.qtype == QTYPE.SRV and len(prefix) == 2:
            for address, ports in addresses:
                for port in ports:
                    if port.name == prefix[0].lstrip("_"):
                        target = SRV(0, 0, port.port, f"{hostname(address)}.{domain}")
                        reply.add_answer(RR(request.q.qname, QTYPE.SRV, rdata=target, ttl=1))
            return reply
        if prefix:
            ips = [address.ip for address, _ in addresses if prefix == [hostname(address)]]
        elif service.spec.cluster_ip == "None":
            ips = [address.ip for address, _ in addresses]
        else:
            ips = [service.spec.cluster_ip]
        if not ips:
            reply.header.rcode = RCODE.NXDOMAIN
        for ip in ips if request.q.qtype in (QTYPE.A, QTYPE.ANY) else []:
            reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(ip), ttl=1))
        return reply


def ready_addresses(service: Any, endpoints: Any) -> list[tuple[Any, Any]]:
    """Addresses of a service's endpoints, each with the ports of its subset."""
    unready = service.spec.publish_not_ready_addresses
    return [
        (address, subset.ports or [])
        for subset in endpoints.subsets or []
        for address in (subset.addresses or [])
        + ((subset.not_ready_addresses or []) if unready else [])
    ]


def hostname(address: Any) -> str:
    return str(address.hostname or address.ip.replace(".", "-"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--listen", required=True)
    flags = parser.parse_args()
    resolver = ClusterResolver(flags.kubeconfig)
    DNSServer(resolver, address=flags.listen, port=53, tcp=True).start_thread()
    DNSServer(resolver, address=flags.listen, port=53).start()
