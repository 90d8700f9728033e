"""A real server over the CPU backend for a whole module, and a client of it."""

import itertools
from collections.abc import Iterator

import pytest

from helpers.server import Serving, serving_in_thread
from pagedkv.client import Client

_numbers = itertools.count()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving_in_thread(num_blocks=64, max_sequence_tokens=512) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Client]:
    with Client(served.address, timeout=60) as client:
        yield client


@pytest.fixture
def name(client: Client) -> Iterator[str]:
    """A fresh sequence id; whatever a test leaves behind is freed, and the audit must be clean."""
    yield f"sequence-{next(_numbers)}"
    left = [sequence.sequence_id for sequence in client.sequences()]
    if left:
        client.free(left)
    audit = client.audit()
    assert audit.ok, audit.findings
