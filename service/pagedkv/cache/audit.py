"""Recompute every state, ref count, hash and sum from the block tables, compare, and put right what differs.

A block in doubt is quarantined: it is forgotten by the index and, once no table holds it, pinned and never given out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pagedkv.cache.block import BlockState
from pagedkv.cache.block_hash import BlockHash
from pagedkv.cache.block_pool import BlockPool, PublishedBlock
from pagedkv.cache.ledger import Ledger, next_pow2
from pagedkv.cache.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found; every finding has been put right when it is reported."""

    findings: tuple[str, ...]
    num_quarantined: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything agreed."""
        return not self.findings


def audit(pool: BlockPool, ledger: Ledger, sequences: SequenceOf[Sequence], hash_block: BlockHash) -> AuditReport:
    """Check and repair; O(blocks and tokens of the pool), one SHA-256 for each published block."""
    auditor = _Auditor(pool, ledger, sequences, hash_block)
    auditor.check()
    if auditor.findings:
        auditor.repair()
    return AuditReport(tuple(auditor.findings), len(pool.quarantined))


def begin_audit(
    pool: BlockPool, ledger: Ledger, sequences: SequenceOf[Sequence], hash_block: BlockHash
) -> Callable[[], bool]:
    """Copy everything now, and return the check of the copy: it may run on any thread, and tells whether all agreed."""
    pool_copy = pool.copy()
    auditor = _Auditor(pool_copy, ledger.copy(pool_copy), [sequence.copy() for sequence in sequences], hash_block)

    def is_sound() -> bool:
        auditor.check()
        return not auditor.findings

    return is_sound


class _Auditor:
    def __init__(self, pool: BlockPool, ledger: Ledger, sequences: SequenceOf[Sequence], hash_block: BlockHash) -> None:
        self.findings: list[str] = []
        self._suspects: set[int] = set()
        self._pool = pool
        self._ledger = ledger
        self._swapped = [sequence for sequence in sequences if sequence.host_table is not None]
        self._sequences = [sequence for sequence in sequences if sequence.host_table is None]
        self._hash_block = hash_block
        self._ref_counts: Counter[int] = Counter()

    def check(self) -> None:
        """Fill `findings`; cuts tables that name what they cannot."""
        self._check_tables()
        self._check_published()
        self._check_states()
        self._check_host()
        self._check_ledger()

    def _check_tables(self) -> None:
        """Count the references. A table is cut before an id outside the pool or one that it names already."""
        for sequence in self._sequences:
            self._ref_counts.update(self._valid_blocks(sequence, sequence.table, self._pool.num_blocks))
        for sequence in self._swapped:
            assert sequence.host_table is not None
            self._valid_blocks(sequence, sequence.host_table, self._pool.host.num_blocks)

    def _valid_blocks(self, sequence: Sequence, table: SequenceOf[int], num_blocks: int) -> set[int]:
        valid: set[int] = set()
        for index, block in enumerate(table):
            if block in valid or not 0 <= block < num_blocks:
                problem = f"its table is cut at index {index}, which names block {block}"
                self.findings.append(f"sequence {sequence.sequence_id!r}: {problem}")
                _cut(sequence, index, self._ledger.block_size)
                break
            valid.add(block)
        return valid

    def _check_published(self) -> None:
        """Recompute every digest from its parent's, and compare the index and the tables with it."""
        for block, entry in self._pool.published.items():
            problem = self._entry_problem(block, entry)
            if problem:
                self._doubt(block, problem)
        for digest, entry in self._pool.index.items():
            if self._pool.published.get(entry.block_id) is not entry or entry.digest != digest:
                self._doubt(entry.block_id, "the index finds it under a digest that it does not have")
        for sequence in self._sequences:
            self._check_tokens(sequence)

    def _entry_problem(self, block: int, entry: PublishedBlock) -> str:
        if entry.block_id != block or self._pool.index.get(entry.digest) is not entry:
            return "it is published, but the index does not find it"
        if isinstance(entry.parent, PublishedBlock) and self._pool.published.get(entry.parent.block_id) is not (
            entry.parent
        ):
            return "it is published, but the block before it is not"
        parent = entry.parent if isinstance(entry.parent, bytes) else entry.parent.digest
        if self._hash_block(parent, entry.tokens, entry.content) != entry.digest:
            return "its digest is not that of its tokens"
        return ""

    def _check_tokens(self, sequence: Sequence) -> None:
        if not sequence.num_published:
            return
        width = len(sequence.token_ids[:1].tobytes()) * self._ledger.block_size
        packed = sequence.token_ids.tobytes()
        for index, block in enumerate(sequence.table[: sequence.num_published]):
            entry = self._pool.published.get(block)
            if entry is not None and entry.tokens != packed[index * width : (index + 1) * width]:
                self._doubt(block, f"its tokens are not those of sequence {sequence.sequence_id!r}")

    def _check_states(self) -> None:
        """Compare each block's state, ref count and list with what the tables say."""
        pool = self._pool
        free = Counter(pool.free)
        holds = Counter(source for seq in self._sequences if seq.open for source, _ in seq.open.copies)
        for block, state in enumerate(pool.states):
            expected = self._expected_state(block, holds)
            if state != expected:
                self._doubt(block, f"its state is {_name(state)}, the tables say {expected.name}")
            elif free[block] != (state == BlockState.FREE) or (block in pool.cached) != (state == BlockState.CACHED):
                self._doubt(block, f"it is {_name(state)}, but not in exactly the lists of that state")
            elif state == BlockState.SHARED and pool.shared.get(block) != self._ref_counts[block]:
                self._doubt(block, f"its ref count is {pool.shared.get(block)}, not {self._ref_counts[block]}")
        if pool.holds != dict(holds):
            self.findings.append(f"holds are {pool.holds}, the open reservations say {dict(holds)}")
        if sum(free.values()) + len(pool.cached) + len(pool.shared) > pool.num_blocks:
            self.findings.append("the lists hold more blocks than the pool")

    def _expected_state(self, block: int, holds: Counter[int]) -> BlockState:
        ref_count = self._ref_counts[block]
        if ref_count:
            return BlockState.SHARED if ref_count > 1 else BlockState.PRIVATE
        if holds[block]:
            return BlockState.IN_FLIGHT
        if block in self._pool.quarantined:
            return BlockState.PINNED
        return BlockState.CACHED if block in self._pool.published else BlockState.FREE

    def _check_host(self) -> None:
        """Compare the holders of host blocks with the swapped tables, and the twins with both pools."""
        host, held = self._pool.host, self._host_holders()
        sums = len(self._swapped), *_host_sums(held)
        if host.holders != held or (host.num_sequences, host.num_shared, host.num_tokens) != sums:
            self.findings.append(f"holders of host blocks are {host.holders}, the tables say {held}")
        if sorted([*host.free, *held]) != list(range(host.num_blocks)):
            self.findings.append("the free host blocks are not those that no table names")
        for block, twin in host.host_of.items():
            is_kept = self._ref_counts[block] or block in self._pool.cached or block in self._pool.holds
            if not is_kept or twin not in held or host.device_of.get(twin) != block:
                self._doubt(block, f"it is the twin of host block {twin}, but one of them is free")
        if len(host.device_of) != len(host.host_of):
            self.findings.append("the twins of device and host blocks differ")

    def _host_holders(self) -> dict[int, dict[str, int]]:
        size, holders = self._ledger.block_size, dict[int, dict[str, int]]()
        for sequence in self._swapped:
            for index, host in enumerate(sequence.host_table or ()):
                view = min(size, max(0, sequence.length - index * size))
                holders.setdefault(host, {})[sequence.sequence_id] = view
        return holders

    def _check_ledger(self) -> None:
        """Compare the sums with a recount."""
        for name, expected in self._ledger.recount(self._sequences).sums().items():
            value = getattr(self._ledger, name)
            if value != expected:
                self.findings.append(f"{name} is {value}, the tables say {expected}")
        if self._ledger.views != self._needed_views():
            self.findings.append("the partial views of blocks are not those of the tables")

    def _needed_views(self) -> dict[int, dict[str, int]]:
        return {block: views for block, views in self._partial_views().items() if self._is_listed(block)}

    def _partial_views(self) -> dict[int, dict[str, int]]:
        size = self._ledger.block_size
        views: dict[int, dict[str, int]] = {}
        for sequence in self._sequences:
            for index in range(sequence.length // size, len(sequence.table)):
                view = max(0, sequence.length - index * size)
                views.setdefault(sequence.table[index], {})[sequence.sequence_id] = view
        return views

    def _is_listed(self, block: int) -> bool:
        pool = self._pool
        is_promised = block in pool.published or block in pool.host.host_of
        return block in self._ledger.views or is_promised or self._ref_counts[block] > 1

    def repair(self) -> None:
        """Quarantine what is in doubt and build lists, ref counts and sums anew from the tables."""
        pool = self._pool
        new = self._suspects - pool.quarantined
        pool.quarantined |= new
        pool.stats.quarantined_blocks += len(new)
        self._unpublish_suspects()
        holds = Counter(source for seq in self._sequences if seq.open for source, _ in seq.open.copies)
        expected = [self._expected_state(block, holds) for block in range(pool.num_blocks)]
        pool.restore(expected, {block: count for block, count in self._ref_counts.items() if count > 1}, dict(holds))
        pool.host.restore(self._host_holders(), len(self._swapped))
        for sequence in self._sequences:
            if any(block not in pool.published for block in sequence.table[: sequence.num_published]):
                sequence.is_hashable = False
            sequence.pow2 = next_pow2(sequence.length)
        self._ledger.restore(self._ledger.recount(self._sequences), self._needed_views())

    def _unpublish_suspects(self) -> None:
        """Forget suspects and every block that descends from one, as nothing could find it."""
        pool = self._pool
        lost = {block for block in pool.published if block in self._suspects}
        while lost:
            for block in lost:
                pool.unpublish(block)
            lost = {
                block
                for block, entry in pool.published.items()
                if isinstance(entry.parent, PublishedBlock)
                and pool.published.get(entry.parent.block_id) is not entry.parent
            }
        pool.index = {entry.digest: entry for entry in pool.published.values()}

    def _doubt(self, block: int, problem: str) -> None:
        self.findings.append(f"block {block}: {problem}")
        self._suspects.add(block)


def _cut(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Shorten a sequence to its first blocks; an open reservation is void."""
    num_tokens = num_blocks * block_size
    table = sequence.table if sequence.host_table is None else sequence.host_table
    del table[num_blocks:]
    del sequence.token_ids[num_tokens:]
    lengths = [min(length, num_tokens) for length in sequence.layer_lengths or [sequence.length]]
    sequence.length = min(lengths)
    sequence.layer_lengths = lengths if max(lengths) > sequence.length else None
    sequence.num_published = min(sequence.num_published, num_blocks)
    sequence.open = None


def _host_sums(holders: dict[int, dict[str, int]]) -> tuple[int, int]:
    """Return the shared host blocks and the tokens in all of them."""
    views = holders.values()
    return sum(len(block) > 1 for block in views), sum(max(block.values()) for block in views)


def _name(state: int) -> str:
    return BlockState(state).name if state in set(BlockState) else str(state)
