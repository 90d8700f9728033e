"""The Python client: AsyncClient for asyncio, Client for everybody else."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a server that goes away is an exception here, not a line on stderr

from pagedkv.client.asynchronous import AsyncClient, AsyncStep
from pagedkv.client.blocking import Client, Step
from pagedkv.client.types import Allocation, Attention, Audit, CacheInfo, Chunk, ModelInfo, SequenceInfo, Swap, Usage

__all__ = [
    "Allocation",
    "AsyncClient",
    "AsyncStep",
    "Attention",
    "Audit",
    "CacheInfo",
    "Chunk",
    "Client",
    "ModelInfo",
    "SequenceInfo",
    "Step",
    "Swap",
    "Usage",
]
