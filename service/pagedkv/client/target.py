"""Targets of a connection: whether one can be meant, and whether it is this machine."""

from __future__ import annotations

import re
from typing import Any

from pagedkv.client.arguments import refuse, text
from pagedkv.loopback import is_loopback

_EXPECTED = "HOST:PORT, [IPV6]:PORT or unix:PATH"
_OF_ANOTHER_FORM = re.compile(r"(unix|unix-abstract|vsock|dns|ipv4|ipv6|xds):")  # gRPC's own, with their own rules
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^:/\[\]\s]+):[0-9]+", re.ASCII)
_PORT = re.compile(r":([0-9]+)(?=,|$)", re.ASCII)


def check_target(target: Any) -> str:
    """Return a target that gRPC takes as it was meant; a port above 65535 it would take modulo 65536."""
    given = text("target", target)
    if given.startswith("unix"):
        return given
    if not _OF_ANOTHER_FORM.match(given) and not _HOST_AND_PORT.fullmatch(given):
        refuse("target", f"must be {_EXPECTED}", given, _EXPECTED)
    for port in _PORT.findall(given):
        if not 0 < int(port) < 65536:
            refuse("target", "must have a port in [1, 65535]", given, 65535)
    return given


def is_loopback_target(target: str) -> bool:
    """Whether a target is this machine, which no proxy of the environment's could reach."""
    if target.startswith("unix"):
        return True
    host = re.sub(r"^(ipv[46]:|dns:(///)?)", "", target)
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    return is_loopback(host)
