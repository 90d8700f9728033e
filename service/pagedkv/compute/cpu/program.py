"""Steps that are recorded once and repeated: every launch of a step of one shape, run by a single call.

A decoder's step makes hundreds of launches whose addresses and sizes depend on the shapes of its inputs alone.
Repeating their record costs no Python between them, and leaves the interpreter to other threads meanwhile.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cpu.compile_cache import Kernel
from pagedkv.compute.cpu.dense_buffers import BufferPool
from pagedkv.compute.cpu.threads import WorkerPool, address_of

Inputs = Sequence[npt.NDArray[Any]]
Body = Callable[[Inputs], Any]

_MOST_PROGRAMS: Final = 32  # the longest unused one goes


class StepRecording:
    """Implements threads.Recording. Records share `buffers`, for nothing there outlives a step but its result."""

    def __init__(self, buffers: BufferPool) -> None:
        self.launches: list[tuple[Kernel, npt.NDArray[np.int64], int]] = []
        self.refreshers: list[Callable[[], None]] = []
        self.is_complete = True
        self._holds: list[Any] = []
        self._buffers = buffers

    def note(self, kernel: Kernel, args: npt.NDArray[np.int64], holds: Sequence[Any], how: int) -> None:
        """See threads.Recording."""
        self.launches.append((kernel, args, how))
        self._holds += holds

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """See threads.Recording."""
        return self._buffers.take(shape)

    def before_replay(self, refresh: Callable[[], None]) -> None:
        """See threads.Recording."""
        self.refreshers.append(refresh)

    def give_up(self) -> None:
        """See threads.Recording."""
        self.is_complete = False


@dataclass(frozen=True, slots=True)
class _Program:
    inputs: list[npt.NDArray[Any]]  # where the launches find them
    words: npt.NDArray[np.int64]
    recording: StepRecording
    result: Any

    def load(self, inputs: Inputs) -> None:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine[...] = given
        for refresh in self.recording.refreshers:
            refresh()


class Programs:
    """The recorded steps of one backend."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._programs: OrderedDict[Hashable, _Program | None] = OrderedDict()  # None: cannot be repeated
        self._buffers = BufferPool(kept_bytes=sys.maxsize)

    @property
    def kept_bytes(self) -> int:
        """Memory of the recorded steps' arrays."""
        return self._buffers.kept_bytes

    def run(self, shape: Hashable, inputs: Inputs, body: Body) -> Any:
        """Return body(inputs), by repeating its record if there is one. The result is valid until the next call."""
        key = (shape, tuple((array.shape, array.dtype) for array in inputs))
        if key not in self._programs:
            return self._record(key, inputs, body)
        self._programs.move_to_end(key)
        program = self._programs[key]
        if program is None:
            return body(inputs)
        program.load(inputs)
        self._workers.run_all(program.words)
        return program.result

    def _record(self, key: Hashable, inputs: Inputs, body: Body) -> Any:
        recording, copies = StepRecording(self._buffers), [np.array(array) for array in inputs]
        with self._workers.record(recording):
            result = body(copies)
        if len(self._programs) >= _MOST_PROGRAMS:
            self._programs.popitem(last=False)
        words = [len(recording.launches)]
        for kernel, args, how in recording.launches:
            words += (kernel.address, address_of(args), how)
        program = _Program(copies, np.array(words, np.int64), recording, result)
        self._programs[key] = program if recording.is_complete else None
        return result
