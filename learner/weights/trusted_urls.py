"""At which addresses a generator may be: what it announces is where weights and prompts are sent."""

import fnmatch
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.network import is_loopback, is_own_address


@dataclass(frozen=True)
class TrustedUrls:
    """Addresses on this machine, those whose host fits an entry of `hosts`, and, with `by_certificate`, every https://
    one: whoever answers there must show a certificate of our own CA. An entry is a host, a pattern such as
    `*.gpu.example`, or a network such as `10.0.0.0/8`.
    """

    hosts: tuple[str, ...] = ()
    by_certificate: bool = False

    def fault(self, url: str) -> str | None:
        """Why nothing is sent to a URL; None if it is trusted."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https") or parts.username or parts.query or parts.fragment:
            return f"{url!r} is no address of a generator: expected http://host:port or https://host:port"
        if port == 0 or not self._is_trusted(host, scheme=parts.scheme):
            return (
                f"its address {url} is not one that this learner sends weights and prompts to: add {host} to "
                "weights.generator_hosts, or give both sides certificates and the learner http.tls_ca_file"
            )
        return None

    def _is_trusted(self, host: str, *, scheme: str) -> bool:
        if is_loopback(host) or host.lower() == socket.gethostname().lower() or is_own_address(host):
            return True
        if self.by_certificate and scheme == "https":
            return True
        return any(_fits(host, entry) for entry in self.hosts)


def _fits(host: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return fnmatch.fnmatchcase(host.lower(), entry.lower())
