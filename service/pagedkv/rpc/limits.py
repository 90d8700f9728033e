"""How much one request may hold. Each limit is stated in the protos and named by the error that enforces it.

They come before every loop over what a client sent, and before parsing: the parser holds the interpreter, and with it
every other call, for as long as it takes. So that no request takes long, all of it that is not a tensor's elements is
small; elements are cut out before the parser sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagedkv.config import require

MAX_PLAIN_BYTES: Final = 2 * 2**20  # of a KvCache request without its tensors' elements
MAX_GENERATION_BYTES: Final = 4 * 2**20  # of a Generation request
MAX_SMALL_BYTES: Final = 64 * 2**10  # of a request of the health and reflection services
MAX_FIELDS: Final = 16_384  # of a request with large tensors; packed repeated fields count once
MAX_SEQUENCES: Final = 4_096  # in one call
MAX_SWAPPED_BLOCKS: Final = 16_384  # in one call over several sequences
MAX_TOKEN_IDS: Final = 2**18  # in one call
MAX_REQUEST_ID_LENGTH: Final = 256
MAX_PAGE_TOKEN_LENGTH: Final = 64


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the cache service holds and sends at most.

    `max_known_tokens` bounds the tokens that live sequences began with, shared ones counted for each: their ids and
    block tables take memory also where no block is written.
    """

    max_message_bytes: int
    max_sequences: int
    max_known_tokens: int


def check_answer(field: str, num_bytes: int, limit: int) -> None:
    """Refuse a request whose answer would be larger than a message may be, before anything is done for it."""
    require(num_bytes <= limit, field, f"must have an answer of at most {limit} bytes", num_bytes, limit)
