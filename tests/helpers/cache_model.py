"""A second, plain cache to hold the manager against: lists, sets and scans, no ids, no counters, no hashes.

A block is an object that knows who holds it and, once full, the whole prefix that it ends. Everything that the manager
keeps up to date is computed here from the tables when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedkv.errors import (
    InvalidArgument,
    OutOfBlocks,
    OutOfHostBlocks,
    PositionMismatch,
    SequenceExists,
    SequenceNotFound,
    SequenceSwapped,
    SequenceTooLong,
    SwapUnavailable,
)


@dataclass(eq=False)
class ModelBlock:
    holders: set[str] = field(default_factory=set)
    prefix: tuple | None = None  # (salt, all token ids up to the block's end) once it can be found
    num_holds: int = 0
    twin: ModelHost | None = None  # holds the same in host memory


@dataclass(eq=False)
class ModelHost:
    holders: set[str] = field(default_factory=set)


@dataclass
class Open:
    layer: int | None
    start: int
    num_tokens: int
    num_fresh: int
    num_known: int
    copy: tuple[ModelBlock, ModelBlock] | None


@dataclass
class ModelSequence:
    salt: bytes | None
    known: list[int]
    lengths: list[int]
    table: list[ModelBlock]
    num_cached: int = 0
    open: Open | None = None
    host: list[ModelHost] | None = None  # while swapped out
    num_published: int = 0  # at the time of the swap
    hashable: bool = True  # False once it held a block that was forgotten

    @property
    def length(self):
        return min(self.lengths)

    @property
    def claimed(self):
        return max([*self.lengths, self.open.start + self.open.num_tokens if self.open else 0])


class CacheModel:
    def __init__(self, num_blocks, block_size, num_layers, sequence_limit, num_host=0):
        self.num_host = num_host
        self.block_size, self.num_layers, self.sequence_limit = block_size, num_layers, sequence_limit
        self.num_blocks = num_blocks
        self.sequences: dict[str, ModelSequence] = {}
        self.cached: list[ModelBlock] = []  # the next to be evicted first

    # operations: raise before any change, as the manager does

    def allocate(self, name, ids, salt):
        self._check_new(name)
        if len(ids or ()) > self.sequence_limit:
            raise SequenceTooLong("", num_tokens=0, limit=0)
        hits = self._find(salt, ids or [])
        for block in hits:
            self._enter(block, name)
        num = len(hits) * self.block_size
        self.sequences[name] = ModelSequence(salt, list(ids or ()), [num] * self.num_layers, hits, num)
        return num

    def reserve(self, requests):
        """Return, for each (name, num_tokens, layer, ids), its start and whether a block is copied."""
        if len({name for name, *_ in requests}) < len(requests):
            raise InvalidArgument("", field="")
        plans, leaving = [], {}
        for name, num_tokens, layer, ids in requests:
            plans.append(self._plan(name, num_tokens, layer, ids, leaving))
        if sum(num_fresh + copies for _, num_fresh, copies in plans) > self.num_available:
            raise OutOfBlocks(needed=0, free=0, evictable=0, total=0)
        needed = sum(num_fresh + copies for _, num_fresh, copies in plans)
        self._evict(needed)
        for request, plan in zip(requests, plans, strict=True):
            self._reserve(request, plan)
        return [(start, copies) for start, _, copies in plans]

    def commit(self, name):
        sequence = self.sequences[name]
        done, sequence.open = sequence.open, None
        if done.copy:
            self._unhold(done.copy[0])
        end = done.start + done.num_tokens
        for layer in range(self.num_layers) if done.layer is None else [done.layer]:
            sequence.lengths[layer] = end
        self._publish_all(name, sequence)

    def cancel(self, name):
        sequence = self.sequences[name]
        undone, sequence.open = sequence.open, None
        del sequence.known[undone.num_known :]
        for block in reversed(sequence.table[len(sequence.table) - undone.num_fresh :]):
            self._leave(block, name)
        del sequence.table[len(sequence.table) - undone.num_fresh :]
        if undone.copy:
            source, fresh = undone.copy
            self._leave(fresh, name)
            self._enter(source, name)
            sequence.table[undone.start // self.block_size] = source
            self._unhold(source)

    def fork(self, parent, child):
        sequence = self._resident(parent)
        self._check_new(child)
        if len(set(sequence.lengths)) > 1:
            raise PositionMismatch("", position=0, expected=0)
        for block in sequence.table:
            block.holders.add(child)
        self.sequences[child] = ModelSequence(
            sequence.salt, sequence.known[: sequence.length], list(sequence.lengths), list(sequence.table)
        )
        self.sequences[child].hashable = sequence.hashable

    def truncate(self, name, num_tokens):
        sequence = self._resident(name)
        if not 0 <= num_tokens <= max(sequence.lengths):
            raise InvalidArgument("", field="")
        if num_tokens == max(sequence.lengths):
            return
        keep = -(-num_tokens // self.block_size)
        for block in reversed(sequence.table[keep:]):
            self._leave(block, name)
        del sequence.table[keep:]
        del sequence.known[num_tokens:]
        sequence.lengths = [min(length, num_tokens) for length in sequence.lengths]

    def free(self, names):
        if len(set(names)) < len(names):
            raise InvalidArgument("", field="")
        for name in names:
            self._get(name)
        for name in names:
            sequence = self.sequences.pop(name)
            if sequence.open and sequence.open.copy:
                self._unhold(sequence.open.copy[0])
            for block in reversed(sequence.table):
                self._leave(block, name)
            self._drop_host(name, sequence)

    def flush(self):
        num_dropped = len(self.cached)
        for block in self.cached:
            block.prefix = block.twin = None
        self.cached = []
        return num_dropped, sum(block.prefix is not None for block in self.live_blocks())

    def forget(self, blocks):
        """Forget blocks and all whose prefix continues theirs; their holders publish nothing more."""
        bad = [block.prefix for block in blocks if block.prefix is not None]
        lost = [
            block
            for block in self._findable()
            if block in blocks or (block.prefix and any(self._continues(block.prefix, prefix) for prefix in bad))
        ]
        twins = [block.twin for block in lost if block.twin]
        for block in lost:
            block.prefix = None
            if block in self.cached:
                self.cached.remove(block)
                block.twin = None
        for sequence in self.sequences.values():
            if any(block in lost for block in sequence.table) or any(host in twins for host in sequence.host or ()):
                sequence.hashable = False

    @staticmethod
    def _continues(prefix, other):
        return prefix[0] == other[0] and prefix[1][: len(other[1])] == other[1]

    def swap_out(self, names):
        """Return how many blocks are copied and how many had a copy."""
        sequences = {name: s for name, s in self._all_closed(names).items() if s.host is None}
        if not self.num_host:
            raise SwapUnavailable("")
        blocks = list({id(block): block for s in sequences.values() for block in s.table}.values())
        fresh = [block for block in blocks if block.twin is None]
        if len(fresh) > self.num_host - len(self.hosts()):
            raise OutOfHostBlocks(needed=0, free=0, total=0)
        for block in fresh:
            block.twin = ModelHost()
        for name, sequence in sequences.items():
            full = min(sequence.length, len(sequence.known)) // self.block_size
            sequence.num_published = 0
            while sequence.num_published < full and sequence.table[sequence.num_published].prefix:
                sequence.num_published += 1
            sequence.host = [block.twin for block in sequence.table]
            for host in sequence.host:
                host.holders.add(name)
        for name, sequence in sequences.items():
            for block in reversed(sequence.table):
                self._leave(block, name)
            sequence.table = []
        return len(fresh), len(blocks) - len(fresh)

    def swap_in(self, names, next_tokens):
        """Return how many blocks are copied and how many were still on the device."""
        sequences = {name: s for name, s in self._all_closed(names).items() if s.host is not None}
        places = {name: self._places(sequence) for name, sequence in sequences.items()}
        together = list({id(place): place for found in places.values() for place in found}.values())
        fresh = [place for place in together if isinstance(place, ModelHost)]
        cached = [place for place in together if place in self.cached]
        needed = len(fresh) + len(cached) + self._num_next(sequences, places, next_tokens)
        if needed > self.num_available:
            raise OutOfBlocks(needed=0, free=0, evictable=0, total=0)
        for name, found in places.items():
            self.sequences[name].table = [place for place in found if isinstance(place, ModelBlock)]
            for block in self.sequences[name].table:
                self._enter(block, name)
        self._evict(len(fresh))
        made = {id(host): ModelBlock(twin=host) for host in fresh}
        for name, sequence in sequences.items():
            sequence.table = [made.get(id(place), place) for place in places[name]]
            for block in sequence.table:
                block.holders.add(name)
        for name, sequence in sequences.items():
            self._drop_host(name, sequence)
            self._publish_all(name, sequence)
        return len(fresh), len(together) - len(fresh)

    # figures, all recounted

    def hosts(self):
        return list({id(h): h for s in self.sequences.values() for h in s.host or ()}.values())

    def held_blocks(self):
        return list({id(b): b for s in self.sequences.values() for b in s.table}.values())

    def live_blocks(self):
        """Return held blocks and those on hold."""
        sources = [s.open.copy[0] for s in self.sequences.values() if s.open and s.open.copy]
        return list({id(b): b for b in [*self.held_blocks(), *sources]}.values())

    @property
    def num_free(self):
        return self.num_blocks - len(self.cached) - len(self.live_blocks())

    @property
    def num_available(self):
        return self.num_free + len(self.cached)

    def num_tokens(self):
        return self._count_tokens(lambda sequence: sequence.table)

    def host_tokens(self):
        return self._count_tokens(lambda sequence: sequence.host or ())

    def _count_tokens(self, table_of):
        fills = {}
        for sequence in self.sequences.values():
            for index, block in enumerate(table_of(sequence)):
                seen = min(self.block_size, max(0, sequence.length - index * self.block_size))
                fills[id(block)] = max(seen, fills.get(id(block), 0))
        return sum(fills.values())

    # private

    def _get(self, name):
        if name not in self.sequences:
            raise SequenceNotFound(name)
        return self.sequences[name]

    def _closed(self, name):
        if self._get(name).open:
            raise InvalidArgument("", field="")
        return self.sequences[name]

    def _resident(self, name):
        if self._closed(name).host is not None:
            raise SequenceSwapped(name)
        return self.sequences[name]

    def _all_closed(self, names):
        if len(set(names)) < len(names):
            raise InvalidArgument("", field="")
        return {name: self._closed(name) for name in names}

    def _places(self, sequence):
        """Return, for each entry of a swapped table, the block on the device that still holds it, or the host block."""
        places = list(sequence.host)
        for index in range(sequence.num_published):
            prefix = (sequence.salt, tuple(sequence.known[: (index + 1) * self.block_size]))
            match = [block for block in self._findable() if block.prefix == prefix]
            if not match:
                break
            places[index] = match[0]
        twins = {id(block.twin): block for block in self._findable() if block.twin}
        return [twins.get(id(place), place) for place in places]

    def _num_next(self, sequences, places, next_tokens):
        """Count what one write after another would take: new blocks, and copies of blocks that others hold too."""
        holders = {}
        for name, found in places.items():
            for place in found:
                holders.setdefault(id(place), set(getattr(place, "holders", ()) if type(place) is ModelBlock else ()))
                holders[id(place)].add(name)
        count = 0
        for name, sequence in sequences.items():
            written, found = max(sequence.lengths), places[name]
            room = min(next_tokens, self.sequence_limit - written)
            if room <= 0:
                continue
            count += max(0, -(-(written + room) // self.block_size) - len(found))
            if sequence.length % self.block_size:
                tail = found[sequence.length // self.block_size]
                if len(holders[id(tail)]) > 1 or getattr(tail, "prefix", None) or getattr(tail, "num_holds", 0):
                    count += 1
                    holders[id(tail)].discard(name)
        return count

    def _drop_host(self, name, sequence):
        for host in sequence.host or ():
            host.holders.discard(name)
        sequence.host = None
        live = {id(host) for host in self.hosts()}
        for block in self._findable():
            if block.twin and id(block.twin) not in live:
                block.twin = None

    def _evict(self, num_needed):
        for _ in range(max(0, num_needed - self.num_free)):
            block = self.cached.pop(0)
            block.prefix = block.twin = None

    def _check_new(self, name):
        if name in self.sequences:
            raise SequenceExists(name)

    def _findable(self):
        return [*self.cached, *self.live_blocks()]

    def _find(self, salt, ids):
        hits = []
        for end in range(self.block_size, len(ids), self.block_size):
            match = [b for b in self._findable() if b.prefix == (salt, tuple(ids[:end]))]
            if not match:
                break
            hits += match
        return hits

    def _plan(self, name, num_tokens, layer, ids, leaving):
        sequence = self._resident(name)
        if layer is None and len(set(sequence.lengths)) > 1:
            raise PositionMismatch("", position=0, expected=0)
        start = sequence.lengths[layer or 0]
        if num_tokens < 1:
            raise InvalidArgument("", field="")
        if start + num_tokens > self.sequence_limit:
            raise SequenceTooLong("", num_tokens=0, limit=0)
        known = sequence.known[start : start + num_tokens]
        if ids is not None and (len(ids) != num_tokens or known != ids[: len(known)]):
            raise InvalidArgument("", field="")
        num_fresh = max(0, -(-(start + num_tokens) // self.block_size) - len(sequence.table))
        copies = False
        if start % self.block_size:
            block = sequence.table[start // self.block_size]
            others = len(block.holders) - leaving.get(id(block), 0) - 1
            copies = block.prefix is not None or block.num_holds > 0 or others > 0
            leaving[id(block)] = leaving.get(id(block), 0) + copies
        return start, num_fresh, copies

    def _reserve(self, request, plan):
        name, num_tokens, layer, ids = request
        start, num_fresh, copies = plan
        sequence = self.sequences[name]
        num_known, copy = len(sequence.known), None
        if copies:
            copy = (sequence.table[start // self.block_size], ModelBlock({name}))
            copy[0].num_holds += 1
            sequence.table[start // self.block_size] = copy[1]
            copy[0].holders.discard(name)
        for block in sequence.table[start // self.block_size :]:
            block.twin = None  # it is written in place
        sequence.table += [ModelBlock({name}) for _ in range(num_fresh)]
        if ids is not None and start <= num_known:
            sequence.known += ids[num_known - start :]
        sequence.open = Open(layer, start, num_tokens, num_fresh, num_known, copy)

    def _publish_all(self, name, sequence):
        for index in range(min(sequence.length, len(sequence.known)) // self.block_size if sequence.hashable else 0):
            self._publish(name, sequence, index)

    def _publish(self, name, sequence, index):
        block = sequence.table[index]
        prefix = (sequence.salt, tuple(sequence.known[: (index + 1) * self.block_size]))
        older = [b for b in self._findable() if b.prefix == prefix]
        if older and older[0] is not block:
            self._enter(older[0], name)
            sequence.table[index] = older[0]
            self._leave(block, name)
        else:
            block.prefix = prefix

    def _enter(self, block, name):
        if block in self.cached:
            self.cached.remove(block)
        block.holders.add(name)

    def _leave(self, block, name):
        block.holders.discard(name)
        self._settle(block)

    def _unhold(self, block):
        block.num_holds -= 1
        self._settle(block)

    def _settle(self, block):
        if block.holders or block.num_holds:
            return
        if block.prefix is None:
            block.twin = None
        elif block not in self.cached:
            self.cached.append(block)
