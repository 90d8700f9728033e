"""A real server for a whole module, and a client of it: over the CPU, and over CUDA on the virtual GPU."""

import itertools
from collections.abc import Iterator

import pytest

from helpers.cuda import virtual_backends
from helpers.server import DefaultBackend, Serving, serving_in_thread
from helpers.waiting import PATIENCE
from pagedkv.client import Client

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have every server of a test run on this backend; returns its name."""
    if request.param == "cpu":
        yield "cpu"
        return
    with virtual_backends() as make, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultBackend, "make", staticmethod(make))
        yield "cuda"


@pytest.fixture(scope="module")
def served(backend: str) -> Iterator[Serving]:
    with serving_in_thread(num_blocks=64, max_sequence_tokens=512) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Client]:
    with Client(served.address, timeout=PATIENCE) as client:
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
