"""Finding and publishing the full blocks of a sequence by the digests of its prefix."""

from __future__ import annotations

from array import array

from pagedkv.cache.block_hash import BlockHash, PrefixExtras
from pagedkv.cache.block_pool import BlockPool, PublishedBlock
from pagedkv.cache.ledger import Ledger
from pagedkv.cache.sequence import Sequence

_TOKEN_BYTES = 4


class PrefixIndex:
    """Walks hash chains over the published blocks of a pool."""

    def __init__(self, pool: BlockPool, ledger: Ledger, block_size: int, block_hash: BlockHash) -> None:
        self.hash_block = block_hash
        self._pool = pool
        self._ledger = ledger
        self._block_size = block_size

    def find(self, root: bytes, token_ids: array[int], extras: PrefixExtras) -> list[PublishedBlock]:
        """Return the leading full blocks that are published, always leaving the last token to be computed."""
        return self.find_blocks(root, token_ids, extras, (len(token_ids) - 1) // self._block_size)

    def find_blocks(
        self, root: bytes, token_ids: array[int], extras: PrefixExtras, num_blocks: int
    ) -> list[PublishedBlock]:
        """Return those of the first `num_blocks` full blocks that are published, up to the first that is not."""
        packed, width, find = token_ids.tobytes(), self._block_size * _TOKEN_BYTES, self._pool.find
        has_content = bool(extras.block_digests)
        parent: PublishedBlock | bytes = root
        digest, found = root, []
        for index in range(num_blocks):
            tokens = packed[index * width : (index + 1) * width]
            content = extras.content(index) if has_content else b""
            digest = self.hash_block(digest, tokens, content)
            entry = find(digest, tokens, content, parent)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, sequence: Sequence, now: float) -> None:
        """Make the sequence's newly full blocks findable; where an equal one is, point the table at that one.

        Stops for good where a digest collides with that of other tokens: what follows could not be told apart.
        """
        size, first = self._block_size, sequence.num_published
        count = min(sequence.length, len(sequence.token_ids)) // size
        if count <= first:
            return
        packed = sequence.token_ids[first * size : count * size].tobytes()
        parent = self._parent(sequence, first)
        has_content = bool(sequence.extras.block_digests)
        for index in range(first, count):
            start = (index - first) * size * _TOKEN_BYTES
            tokens = packed[start : start + size * _TOKEN_BYTES]
            block = sequence.table[index]
            if parent is None or block in self._pool.quarantined:
                sequence.is_hashable = False
                return
            content = sequence.extras.content(index) if has_content else b""
            digest = self.hash_block(parent if isinstance(parent, bytes) else parent.digest, tokens, content)
            entry = PublishedBlock(block, digest, tokens, content, parent, now)
            parent = self._publish_block(sequence, index, entry, now)
            sequence.num_published = index + (parent is not None)

    def _parent(self, sequence: Sequence, index: int) -> PublishedBlock | bytes | None:
        return self._pool.published.get(sequence.table[index - 1]) if index else sequence.chain_root

    def _publish_block(
        self, sequence: Sequence, index: int, entry: PublishedBlock, now: float
    ) -> PublishedBlock | None:
        """Return the block that is published now for the entry's content, None after a collision."""
        if entry.digest not in self._pool.index:
            self._pool.publish(entry)
            return entry
        older = self._pool.find(entry.digest, entry.tokens, entry.content, entry.parent)
        if older is None:
            self._pool.stats.hash_collisions += 1
            sequence.is_hashable = False
            return None
        self._ledger.enter(older.block_id, sequence.sequence_id, self._block_size, now)
        sequence.table[index] = older.block_id
        self._ledger.leave(entry.block_id, sequence.sequence_id, self._block_size, now)
        self._pool.stats.deduplicated_blocks += 1
        return older
