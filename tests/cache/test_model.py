"""The manager against a plain model, step by step, with an audit and a recount after each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.cache_model import CacheModel
from helpers.caches import assert_evicts_children_first
from pagedkv.cache import BlockState, CacheManager, PrefixExtras, ReserveRequest
from pagedkv.cache.ledger import next_pow2
from pagedkv.config import CacheConfig
from pagedkv.errors import PagedKvError

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
SIZE = 4
PROMPTS = ([1] * 26, [1] * 8 + [2] * 18)  # so alike that prefixes meet all the time
MODES = st.sampled_from(["known", "known", "known", "none", "any"])


@st.composite
def token_ids(draw):
    """Draw the head of a prompt, mostly of whole blocks and one token."""
    return draw(st.sampled_from(PROMPTS))[: draw(st.sampled_from([0, 5, 9, 10, 13, 13, 17, 21, 24, 26]))]


def snapshot(cache):
    """Everything a caller can see, but for counters of attempts."""
    return (cache.usage(), cache.accounting(), [cache.sequence(name) for name in cache.sequence_ids()])


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 20), num_layers=st.integers(1, 2), num_host=st.sampled_from([0, 4, 12, 30]))
    def make(self, num_blocks, num_layers, num_host):
        config = CacheConfig(num_blocks, SIZE, num_layers, max_sequence_tokens=24, num_host_blocks=num_host)
        self.now = 0.0
        self.cache = CacheManager(config, clock=lambda: self.now)
        self.model = CacheModel(num_blocks, SIZE, num_layers, config.sequence_limit, num_host)
        self.open = {}
        self.audit_of_copy = self.cache.begin_audit()

    def both(self, ours, theirs):
        """Run both; they return or raise alike, and a failure changes nothing."""
        self.now += 1
        try:
            expected, error = theirs(), None
        except PagedKvError as raised:
            expected, error = None, type(raised)
        before = snapshot(self.cache)
        try:
            result, got = ours(), None
        except PagedKvError as raised:
            result, got = None, type(raised)
            assert snapshot(self.cache) == before
        assert got is error
        return result, expected

    @rule(name=NAMES, ids=token_ids() | st.none(), salt=st.sampled_from([None, None, None, b""]))
    def allocate(self, name, ids, salt):
        extras = PrefixExtras(salt=salt)
        probed = self.cache.probe_prefix(ids or [], extras)
        result, expected = self.both(
            lambda: self.cache.allocate(name, ids, extras=extras), lambda: self.model.allocate(name, ids, salt)
        )
        if result is not None:
            assert result.num_cached_tokens == expected == probed

    @rule(data=st.data(), ids=token_ids(), salt=st.sampled_from([None, None, None, b""]))
    def start(self, data, ids, salt):
        """Allocate under a new name, if there is one, and write all of the prompt."""
        name = data.draw(st.sampled_from(sorted(set("abcde") - set(self.model.sequences)) or ["a"]))
        ids = ids[: self.model.sequence_limit]
        if name in self.model.sequences:
            return
        self.allocate(name, ids, salt)
        rest = len(ids) - self.model.sequences[name].length
        self.reserve_and_end([(name, rest, None, None)], "commit")

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), count=st.integers(1, 3), end=st.sampled_from(["commit", "commit", "cancel", "leave"]))
    def reserve(self, data, count, end):
        self.reserve_and_end([self.draw_request(data) for _ in range(count)], end)

    def reserve_and_end(self, requests, end):
        result, expected = self.both(
            lambda: self.cache.reserve_batch([ReserveRequest(*request) for request in requests]),
            lambda: self.model.reserve(requests),
        )
        if result is None:
            return
        assert [(r.start, bool(r.copies)) for r in result] == expected
        self.check()
        self.open |= {reservation.sequence_id: reservation for reservation in result}
        if end == "commit":
            self.finish_all(result)
        elif end == "cancel":
            for reservation in reversed(result):
                self.cancel_open(reservation.sequence_id)

    def draw_request(self, data):
        """Draw a request that mostly succeeds: the rest of the known tokens, or what the prompts say comes next."""
        name = data.draw(st.sampled_from(sorted(self.model.sequences)))
        layer = data.draw(st.sampled_from([None, None, *range(self.model.num_layers)]))
        sequence = self.model.sequences[name]
        start = sequence.lengths[layer or 0]
        rest = max(1, len(sequence.known) - start)
        num_tokens = data.draw(st.sampled_from([rest, rest, 1, 2, SIZE, 2 * SIZE, 0]))
        mode = data.draw(MODES)
        if mode == "none":
            return name, num_tokens, layer, None
        known = sequence.known[start:] if mode == "known" else []
        follow = data.draw(st.sampled_from(PROMPTS))[start + len(known) :]
        return name, num_tokens, layer, (known + follow)[:num_tokens]

    def finish_all(self, reservations):
        self.now += 1
        self.cache.commit_batch(reservations)
        for reservation in reservations:
            self.model.commit(reservation.sequence_id)
            del self.open[reservation.sequence_id]

    def cancel_open(self, name):
        self.now += 1
        self.cache.cancel(self.open.pop(name))
        self.model.cancel(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.booleans())
    def end_open(self, data, commit):
        name = data.draw(st.sampled_from(sorted(self.open)))
        if commit:
            self.finish_all([self.open[name]])
        else:
            self.cancel_open(name)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), child=NAMES)
    def fork(self, data, child):
        parent = data.draw(st.sampled_from(sorted(self.model.sequences)))
        self.both(lambda: self.cache.fork(parent, child), lambda: self.model.fork(parent, child))

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), num_tokens=st.integers(-1, 25), near=st.booleans())
    def truncate(self, data, num_tokens, near):
        name = data.draw(st.sampled_from(sorted(self.model.sequences)))
        if near:
            num_tokens = max(self.model.sequences[name].lengths) - num_tokens % 6
        self.both(lambda: self.cache.truncate(name, num_tokens), lambda: self.model.truncate(name, num_tokens))

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), num_given_back=st.integers(1, SIZE - 1), end=st.sampled_from(["commit", "cancel", "leave"]))
    def rewrite(self, data, num_given_back, end):
        """Give back the end of a sequence and begin to write it anew: mostly a copy of a published block."""
        name = data.draw(st.sampled_from(sorted(self.model.sequences)))
        sequence = self.model.sequences[name]
        if sequence.open or sequence.host is not None or min(sequence.lengths) < num_given_back:
            return
        num_tokens = min(sequence.lengths) - num_given_back
        self.both(lambda: self.cache.truncate(name, num_tokens), lambda: self.model.truncate(name, num_tokens))
        self.reserve_and_end([(name, 1, None, None)], end)

    @precondition(lambda self: len(self.model.sequences) > 1)
    @rule(names=st.lists(NAMES, min_size=1, max_size=2))
    def free(self, names):
        self.both(lambda: self.cache.free_batch(names), lambda: self.model.free(names))
        self.open = {name: made for name, made in self.open.items() if name in self.model.sequences}

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), count=st.integers(1, 3))
    def swap_out(self, data, count):
        names = [data.draw(st.sampled_from(sorted(self.model.sequences))) for _ in range(count)]
        self.swap(self.cache.swap_out, self.model.swap_out, names)

    @precondition(lambda self: any(s.host is not None for s in self.model.sequences.values()))
    @rule(data=st.data(), next_tokens=st.sampled_from([0, 1, 1, 6]))
    def swap_in(self, data, next_tokens):
        swapped = sorted(name for name, s in self.model.sequences.items() if s.host is not None)
        names = data.draw(st.lists(st.sampled_from(swapped), min_size=1, unique=True))
        resident = sorted(set(self.model.sequences) - set(swapped))
        if resident and data.draw(st.booleans()):
            names.append(data.draw(st.sampled_from(resident)))
        if len(names) == 1:
            need = self.cache.swap_in_need(names[0], next_tokens).total
            fits = need <= self.cache.num_available()
        done = self.swap(self.cache.swap_in, self.model.swap_in, names, next_tokens)
        assert len(names) > 1 or done == fits
        if done:
            self.write_next([name for name in names if name in swapped], next_tokens)

    def write_next(self, names, num_tokens):
        """What a swap-in left room for can be written at once (and is given back)."""
        rooms = {
            name: min(num_tokens, self.model.sequence_limit - max(self.model.sequences[name].lengths)) for name in names
        }
        writers = [
            name for name, room in rooms.items() if room > 0 and len(set(self.model.sequences[name].lengths)) == 1
        ]
        if writers and len(writers) == len(names):
            made = self.cache.reserve_batch([ReserveRequest(name, rooms[name]) for name in writers])
            self.model.reserve([(name, rooms[name], None, None) for name in writers])
            self.open |= {reservation.sequence_id: reservation for reservation in made}
            for reservation in reversed(made):
                self.cancel_open(reservation.sequence_id)

    def swap(self, ours, theirs, names, *args):
        """Swap both; return whether they did."""
        result, expected = self.both(lambda: ours(names, *args), lambda: theirs(names, *args))
        if result is not None:
            assert (len(result.pairs), result.num_kept) == expected
            assert all(len({pair[side] for pair in result.pairs}) == len(result.pairs) for side in (0, 1))
        return result is not None

    @rule()
    def flush(self):
        result = self.cache.flush_prefix_cache()
        assert (result.num_dropped, result.num_kept) == self.model.flush()

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def forget(self, data):
        """What a sequence holds from some block on proved bad."""
        sequence = self.model.sequences[name := data.draw(st.sampled_from(sorted(self.model.sequences)))]
        if sequence.host is None:
            at = data.draw(st.integers(0, len(sequence.table)))
            self.cache.forget(self.cache.block_table(name)[at:])
            self.model.forget(sequence.table[at:])

    @invariant()
    def check(self):
        assert self.audit_of_copy(), "the copy has changed with the cache"
        report = self.cache.audit()
        assert report.ok, report.findings
        self.audit_of_copy = self.cache.begin_audit()
        assert_evicts_children_first(self.cache)
        self.check_tables()
        self.check_usage()
        self.check_accounting()

    def check_tables(self):
        assert set(self.cache.sequence_ids()) == set(self.model.sequences)
        ids, hosts = {}, {}
        for name, sequence in self.model.sequences.items():
            view = self.cache.sequence(name)
            assert view.layer_lengths == tuple(sequence.lengths)
            assert view.num_known_tokens == len(sequence.known)
            assert view.num_cached_tokens == sequence.num_cached
            assert view.is_swapped == (sequence.host is not None)
            for host, host_id in zip(sequence.host or (), view.host_table or (), strict=True):
                assert hosts.setdefault(id(host), host_id) == host_id
            assert len(view.block_table) == len(sequence.table)
            for block, block_id in zip(sequence.table, view.block_table, strict=True):
                assert ids.setdefault(id(block), block_id) == block_id
        assert len(set(ids.values())) == len(ids), "two blocks of the model have one id"
        assert len(set(hosts.values())) == len(hosts), "two host blocks of the model have one id"

    def check_usage(self):
        usage, held = self.cache.usage(), self.model.held_blocks()
        num_shared = sum(len(block.holders) > 1 for block in held)
        num_in_flight = len(self.model.live_blocks()) - len(held)
        got = (usage.free, usage.cached, usage.private, usage.shared, usage.in_flight, usage.pinned)
        assert got == (
            self.model.num_free, len(self.model.cached), len(held) - num_shared, num_shared, num_in_flight, 0
        )  # fmt: skip
        assert sum(got) == usage.total == self.model.num_blocks
        assert usage.num_tokens == self.model.num_tokens()
        hosts, swapped = self.model.hosts(), [s for s in self.model.sequences.values() if s.host is not None]
        num_shared = sum(len(host.holders) > 1 for host in hosts)
        assert (usage.host_private, usage.host_shared) == (len(hosts) - num_shared, num_shared)
        assert usage.host_free == self.model.num_host - len(hosts)
        assert (usage.num_swapped, usage.swapped_tokens) == (len(swapped), self.model.host_tokens())

    def check_accounting(self):
        accounting = self.cache.accounting()
        sequences = [s for s in self.model.sequences.values() if s.host is None]
        num_held, num_tokens = len(self.model.held_blocks()), self.model.num_tokens()
        logical, tables = sum(s.length for s in sequences), sum(len(s.table) for s in sequences)
        reserved = sum(s.claimed - s.length for s in sequences)
        assert (accounting.held_blocks, accounting.logical_blocks) == (num_held, tables)
        assert (accounting.num_tokens, accounting.reserved_slots) == (num_tokens, reserved)
        assert accounting.tail_slots == num_held * SIZE - num_tokens - reserved >= 0
        assert accounting.cached_slots == len(self.model.cached) * SIZE
        assert accounting.contiguous_oracle == logical
        assert accounting.contiguous_pow2 == sum(next_pow2(s.length) for s in sequences)
        assert accounting.contiguous_max == len(sequences) * self.model.sequence_limit
        assert accounting.free_runs.num_free == self.model.num_available
        states = self.cache.pool.states
        assert sum(states.count(state) for state in BlockState) == self.model.num_blocks


CacheMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheAgainstModel = CacheMachine.TestCase
