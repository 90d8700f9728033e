"""What a target of a connection says of where the server is."""

from __future__ import annotations

import re

from pagedkv.loopback import is_loopback


def is_loopback_target(target: str) -> bool:
    """Whether a target is this machine, which no proxy of the environment's could reach."""
    host = re.sub(r"^(ipv[46]:|dns:(///)?)", "", target)
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    return is_loopback(host)
