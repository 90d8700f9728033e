"""What this process holds open or mapped of a path."""

from __future__ import annotations

import os
from pathlib import Path


def open_handles(path: Path) -> list[str]:
    """Return the descriptors and memory maps of this process that lie at or under `path` (Linux)."""
    prefix = str(path.resolve())
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # the descriptor of the listing itself
            continue
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in [*links, *maps] if name.startswith(prefix)]
