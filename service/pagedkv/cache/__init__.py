"""Control plane: which sequence holds which block. Standard library only; device memory is never touched here."""

from pagedkv.cache.accounting import Accounting, FreeRuns
from pagedkv.cache.audit import AuditReport
from pagedkv.cache.block import BlockState, CacheStats, Usage
from pagedkv.cache.block_hash import PrefixExtras
from pagedkv.cache.block_pool import CacheObserver, FlushResult
from pagedkv.cache.manager import CacheManager
from pagedkv.cache.sequence import Allocation, Reservation, ReserveRequest, SequenceView
from pagedkv.cache.swap import SwapNeed, SwapPlan

__all__ = [
    "Accounting",
    "Allocation",
    "AuditReport",
    "BlockState",
    "CacheManager",
    "CacheObserver",
    "CacheStats",
    "FlushResult",
    "FreeRuns",
    "PrefixExtras",
    "Reservation",
    "ReserveRequest",
    "SequenceView",
    "SwapNeed",
    "SwapPlan",
    "Usage",
]
