"""Random calls over the wire against dense NumPy arrays: whatever blocks are shared or moved, attention is exact."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from helpers.server import SHAPE, serving_in_thread
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv.client import Client
from pagedkv.errors import OutOfBlocks, OutOfHostBlocks, PositionMismatch, SequenceSwapped

LAYERS, BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = SHAPE.num_layers, 8, 24, 16
_numbers = itertools.count()
layers = st.integers(0, LAYERS - 1)


def _no_rows() -> list[np.ndarray]:
    return [np.zeros((0, SHAPE.num_kv_heads, SHAPE.head_dim), np.float32) for _ in range(LAYERS)]


@dataclass
class Dense:
    """K and V of one sequence, layer by layer."""

    keys: list[np.ndarray] = field(default_factory=_no_rows)
    values: list[np.ndarray] = field(default_factory=_no_rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.keys))

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys[layer] = np.concatenate([self.keys[layer], keys])
        self.values[layer] = np.concatenate([self.values[layer], values])


class WireMachine(RuleBasedStateMachine):
    """Sequences of one client over a small pool; `client` is set by the test."""

    client: Client
    names = Bundle("names")

    @initialize()
    def begin(self) -> None:
        self.dense: dict[str, Dense] = {}
        self.swapped: set[str] = set()

    @rule(target=names)
    def allocate(self):
        name = f"machine-{next(_numbers)}"
        self.client.allocate(name)
        self.dense[name] = Dense()
        return name

    @rule(name=names, layer=layers, num_tokens=st.integers(1, 20))
    def append_one_layer(self, name, layer, num_tokens):
        keys, values = make_rows(num_tokens, next(_numbers))
        position = self.dense[name].lengths[layer]
        if self._succeeds(lambda: self.client.append(name, keys, values, layer=layer, position=position)):
            self.dense[name].append(layer, keys, values)

    @rule(name=names, num_tokens=st.integers(1, 20))
    def append_all_layers(self, name, num_tokens):
        keys, values = make_rows(num_tokens, next(_numbers), num_layers=LAYERS)
        if self._succeeds(lambda: self.client.append(name, keys, values), self.dense[name]):
            for layer in range(LAYERS):
                self.dense[name].append(layer, keys[layer], values[layer])

    @rule(target=names, parent=names)
    def fork(self, parent):
        child = f"machine-{next(_numbers)}"
        assume(len(set(self.dense[parent].lengths)) == 1)
        assume(parent not in self.swapped)
        self.client.fork(parent, child)
        self.dense[child] = copy.deepcopy(self.dense[parent])
        return child

    @rule(name=names, data=st.data())
    def truncate(self, name, data):
        dense = self.dense[name]
        assume(name not in self.swapped)
        num_tokens = data.draw(st.integers(0, max(dense.lengths)))
        self.client.truncate(name, num_tokens)
        dense.keys = [rows[:num_tokens] for rows in dense.keys]
        dense.values = [rows[:num_tokens] for rows in dense.values]

    @rule(name=consumes(names))
    def free(self, name):
        self.client.free(name)
        del self.dense[name]
        self.swapped.discard(name)

    @rule(data=st.data())
    def swap_out(self, data):
        names = self._draw_names(data, self.dense)
        try:
            self.client.swap_out(names)
        except OutOfHostBlocks:
            return
        self.swapped.update(names)
        with pytest.raises(SequenceSwapped):
            self.client.attend(names[:1], make_queries(0), layer=0, query_lens=[0])

    @rule(data=st.data())
    def swap_in(self, data):
        names = self._draw_names(data, self.swapped)
        if self._succeeds(lambda: self.client.swap_in(names)):
            self.swapped.difference_update(names)

    def _draw_names(self, data, names):
        assume(names)
        return data.draw(st.lists(st.sampled_from(sorted(names)), min_size=1, unique=True))

    @rule(layer=layers, data=st.data())
    def attend(self, layer, data):
        """Attend over every sequence on the device at once."""
        names = [name for name in self.dense if name not in self.swapped]
        assume(names)
        lengths = [self.dense[name].lengths[layer] for name in names]
        query_lens = [data.draw(st.integers(0, min(length, 4))) for length in lengths]
        queries = make_queries(sum(query_lens), next(_numbers))
        result = self.client.attend(names, queries, layer=layer, query_lens=query_lens)
        self._assert_exact(result, names, layer, queries, query_lens)

    @rule(layer=layers, data=st.data())
    def attend_writing(self, layer, data):
        """Write and attend over some sequences at once, as a decoder does."""
        names = self._draw_names(data, set(self.dense) - self.swapped)
        query_lens = [data.draw(st.integers(0, 5)) for _ in names]
        total = sum(query_lens)
        (keys, values), queries = make_rows(total, next(_numbers)), make_queries(total, next(_numbers))
        positions = [self.dense[name].lengths[layer] for name in names]
        options = {"query_lens": query_lens, "positions": positions, "keys": keys, "values": values}
        answers = []
        if self._succeeds(lambda: answers.append(self.client.attend(names, queries, layer=layer, **options))):
            cuts = np.cumsum(query_lens)[:-1]
            for name, new_keys, new_values in zip(names, np.split(keys, cuts), np.split(values, cuts), strict=True):
                self.dense[name].append(layer, new_keys, new_values)
            self._assert_exact(answers[0], names, layer, queries, query_lens)

    @invariant()
    def pool_is_sound_and_lengths_agree(self):
        audit = self.client.audit()
        assert audit.ok, audit.findings
        for name, dense in self.dense.items():
            sequence = self.client.sequence(name)
            assert sequence.layer_lengths == dense.lengths
            assert sequence.is_swapped == (name in self.swapped)

    def teardown(self) -> None:
        if self.dense:
            self.client.free(list(self.dense))
        usage = self.client.usage()
        assert usage.free + usage.cached == usage.total
        assert usage.host_free == usage.host_total == NUM_HOST_BLOCKS

    def _assert_exact(self, result, names, layer, queries, query_lens):
        keys, values = ([getattr(self.dense[name], side)[layer] for name in names] for side in ("keys", "values"))
        assert_attention(result, queries, keys, values, query_lens)

    def _succeeds(self, call, dense: Dense | None = None) -> bool:
        """Whether the pool had room; a refusal for unequal layers must have that reason."""
        try:
            call()
        except OutOfBlocks:
            return False
        except SequenceSwapped:
            assert self.swapped
            return False
        except PositionMismatch:
            assert dense is not None
            assert len(set(dense.lengths)) > 1
            return False
        return True


def test_random_calls_agree_with_dense_arrays(backend):
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_host_blocks": NUM_HOST_BLOCKS}
    with serving_in_thread(**sizes) as served, Client(served.address) as client:
        WireMachine.client = client
        WireMachine.TestCase.settings = settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        )
        WireMachine.TestCase().runTest()
