"""The name of a full block's content: a salted chain of SHA-256 digests.

digest(block i) = SHA-256(digest(block i - 1), token ids as packed int32, content digest if there is one), and the
chain starts at SHA-256(root, salt, model, adapter), each field tagged and length-delimited. So an equal digest means
equal tokens at equal positions under equal extras, and a process with a random root can be probed by nobody.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from pagedkv.config import require
from pagedkv.errors import InvalidArgument

BlockHash = Callable[[bytes, bytes, bytes], bytes]  # (parent digest, packed token ids, tagged content) -> digest


@dataclass(frozen=True, slots=True)
class PrefixExtras:
    """What besides the tokens makes K and V differ; sequences share blocks only where all of it is equal.

    None and the empty value are different. `block_digests` maps a block's index in the sequence to a digest of what
    its placeholder tokens stand for (an image, audio); it changes that block and all after it.
    """

    salt: bytes | None = None
    model: str | None = None
    adapter: str | None = None
    block_digests: Mapping[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("salt", bytes), ("model", str), ("adapter", str)):
            value = getattr(self, name)
            require(value is None or isinstance(value, kind), name, f"must be {kind.__name__} or None", value)
        for index, digest in self.block_digests.items():
            require(isinstance(index, int) and index >= 0, "block_digests", "must have block indices as keys", index, 0)
            require(isinstance(digest, bytes), "block_digests", "must have bytes as values", digest)

    def chain_root(self, root: bytes) -> bytes:
        """Return the digest that stands before the first block."""
        fields = ((b"R", root), (b"S", self.salt), (b"M", self.model), (b"A", self.adapter))
        return sha256(b"".join(_tagged(tag, value) for tag, value in fields if value is not None)).digest()

    def content(self, index: int) -> bytes:
        """Return the tagged content digest of block `index`, empty if it has none."""
        digest = self.block_digests.get(index)
        return b"" if digest is None else _tagged(b"C", digest)


NO_EXTRAS = PrefixExtras()


def hash_block(parent: bytes, tokens: bytes, content: bytes) -> bytes:
    """Return the digest of a full block. Unambiguous: `parent` and `tokens` have the same length for every block."""
    return sha256(parent + tokens + content).digest()


def pack_token_ids(token_ids: Sequence[int], field_name: str = "token_ids") -> array[int]:
    """Return the ids as int32. Raises InvalidArgument naming the first that is no 32-bit integer."""
    try:
        return array("i", token_ids if not isinstance(token_ids, (bytes, bytearray)) else list(token_ids))
    except (OverflowError, TypeError):
        for position, token_id in enumerate(token_ids):
            valid = isinstance(token_id, int) and -(2**31) <= token_id < 2**31
            require(valid, f"{field_name}[{position}]", "must be a 32-bit integer", token_id, 2**31 - 1)
        raise InvalidArgument("must be 32-bit integers", field=field_name) from None


def _tagged(tag: bytes, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return tag + struct.pack("<Q", len(data)) + data
