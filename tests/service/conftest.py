"""A real `pagedkv serve smollm2`, in its own process, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.process import ServiceProcess


@pytest.fixture(scope="session")
def smollm2_service() -> Iterator[ServiceProcess]:
    with ServiceProcess("serve", "smollm2", "--blocks", "512") as service:
        yield service
