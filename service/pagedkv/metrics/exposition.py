"""Metrics as text, in the Prometheus or the OpenMetrics format, whichever the scraper asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

_FAMILIES_AT_ONCE = 4
_OPENMETRICS_END = b"# EOF\n"


class _Part(CollectorRegistry):
    """A few collected families, for the encoders, which read registries."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type.

    All figures are read at once, so that they agree; writing them out, which costs more, yields to the loop every
    few families.
    """
    encode, content_type = choose_encoder(accept)
    families = list(registry.collect())
    parts = []
    for start in range(0, len(families), _FAMILIES_AT_ONCE):
        text = encode(_Part(families[start : start + _FAMILIES_AT_ONCE]))
        parts.append(text.removesuffix(_OPENMETRICS_END))
        await asyncio.sleep(0)
    if content_type.startswith("application/openmetrics-text"):
        parts.append(_OPENMETRICS_END)
    return b"".join(parts), content_type
