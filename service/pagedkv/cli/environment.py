"""The variables PAGEDKV_*: ours, but for what a platform puts there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, MutableMapping

_OF_KUBERNETES = ("tcp://", "udp://", "sctp://")
_OPTION = re.compile(r"PAGEDKV(_[A-Z]+)+")


def drop_platform_variables(say: Callable[[str], None], variables: MutableMapping[str, str] = os.environ) -> None:
    """Remove what Kubernetes sets for a service that is named pagedkv, and say so where it has an option's name."""
    for name, value in list(variables.items()):
        if name.startswith("PAGEDKV_") and value.startswith(_OF_KUBERNETES):
            del variables[name]
            if _OPTION.fullmatch(name):
                say(f"{name}={value} is ignored: Kubernetes sets it for a service of that name")
