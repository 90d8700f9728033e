"""A thread pool for kernels: starting and ending a parallel region costs microseconds and never takes the GIL.

A kernel `void(int64 args, int64 thread_index)` takes work items until none is left, by `claim(args)`: word 0 of its
arguments is the next item, word 1 the number of items. A worker that wakes late simply finds nothing to do, so a
region ends as soon as its items are done. Kernels run with denormals flushed to zero.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pagedkv.compute.cpu.cgroup import usable_cores
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.simd import load_i64, store_i64
from pagedkv.compute.cpu.simd_emit import I32, I64, emit_call, emit_pointer
from pagedkv.errors import DeviceLost

# Byte offsets into the pool's state; words that different threads write lie on different cache lines.
_EPOCH: Final = 0  # grows with every region; idle workers wait for it to change
_GATE: Final = 64  # 1 while workers may enter the region
_ACTIVE: Final = 128  # workers inside the region
_SLEEPING: Final = 192  # workers that must be woken by the kernel of the operating system
_STOP: Final = 256
_FUNCTION: Final = 320
_ARGS: Final = 328
_NUM_WORKERS: Final = 336
_STATE_WORDS: Final = 64

# How a launch runs.
SERIAL: Final = 0  # on the caller's thread alone
PARALLEL: Final = 1  # as one region
TOGETHER: Final = 2  # several kernels as one region, by `_call_each`

_IDLE_SPINS: Final = 4000  # 0.1 ms: longer than what the Python between two operations of a step takes
_END_SPINS: Final = 2000
_FUTEX_WAIT: Final = 128  # FUTEX_WAIT | FUTEX_PRIVATE_FLAG
_FUTEX_WAKE: Final = 129
_FLUSH_DENORMALS: Final = 0x8040  # FTZ and DAZ of MXCSR


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at the address, atomically; return what it held before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _load_ordered(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store_ordered(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _is_x86(context: Any) -> bool:
    return str(context.codegen().magic_tuple()[0]).startswith(("x86_64", "i686"))


@intrinsic
def _pause(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _is_x86(context):
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield_core(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _futex(typingctx: Any, address: Any, operation: Any, value: Any) -> Any:
    """Wait on, or wake waiters of, the low half of the word at the address (Linux)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.Constant(I64, 202 if _is_x86(context) else 98)
        none = ir.Constant(I64, 0)
        emit_call(builder, "syscall", I64, [number, args[0], args[1], args[2], none, none, none])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, args_address: Any, thread_index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _exchange_float_mode(typingctx: Any, bits: Any) -> Any:
    """Set the x86 float control word to `bits` or, where `bits` is negative, add -bits; return the old word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _is_x86(context):
            return ir.Constant(I64, 0)
        word = builder.alloca(I32)
        emit_call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [word])
        old = builder.load(word, typ=I32)
        asked = builder.trunc(args[0], I32)
        is_addition = builder.icmp_signed("<", asked, ir.Constant(I32, 0))
        builder.store(builder.select(is_addition, builder.or_(old, builder.neg(asked)), asked), word)
        emit_call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [word])
        return builder.zext(old, I64)

    return types.int64(types.int64), codegen


@intrinsic
def claim(typingctx: Any, args_address: Any) -> Any:
    """Return the next work item of a region, or -1 when none is left."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = builder.atomic_rmw("add", _word(builder, args[0]), ir.Constant(I64, 1), "seq_cst")
        count = builder.load(emit_pointer(builder, args[0], 8), typ=I64, align=8)
        return builder.select(builder.icmp_signed("<", item, count), item, ir.Constant(I64, -1))

    return types.int64(types.int64), codegen


@intrinsic
def peek(typingctx: Any, args_address: Any) -> Any:
    """Return the work item that the next claim would get, if nobody came between, or -1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = builder.load_atomic(_word(builder, args[0]), "monotonic", 8)
        count = builder.load(emit_pointer(builder, args[0], 8), typ=I64, align=8)
        return builder.select(builder.icmp_signed("<", item, count), item, ir.Constant(I64, -1))

    return types.int64(types.int64), codegen


def _work(state: Any, thread_index: Any) -> Any:
    """Body of a worker thread: wait for a region, enter while its gate is open, take part, leave."""
    _exchange_float_mode(-_FLUSH_DENORMALS)
    seen = load_i64(state + _EPOCH) * 0
    while True:
        spins = 0
        while _load_ordered(state + _EPOCH) == seen:
            spins += 1
            _pause()
            if spins >= _IDLE_SPINS:
                fetch_add(state + _SLEEPING, 1)
                _futex(state + _EPOCH, _FUTEX_WAIT, seen)
                fetch_add(state + _SLEEPING, -1)
        seen = _load_ordered(state + _EPOCH)
        if _load_ordered(state + _STOP) != 0:
            return
        fetch_add(state + _ACTIVE, 1)
        if _load_ordered(state + _GATE) != 0:
            _call(load_i64(state + _FUNCTION), load_i64(state + _ARGS), thread_index)
        fetch_add(state + _ACTIVE, -1)


@njit(error_model="numpy", nogil=True)
def _region(state: int, function: int, args: int) -> None:
    """Open a region, take part as thread 0, close it and wait for the workers inside."""
    num_workers = load_i64(state + _NUM_WORKERS)
    store_i64(state + _FUNCTION, function)
    store_i64(state + _ARGS, args)
    if num_workers > 0:
        _store_ordered(state + _GATE, 1)
        fetch_add(state + _EPOCH, 1)
        if _load_ordered(state + _SLEEPING) > 0:
            _futex(state + _EPOCH, _FUTEX_WAKE, num_workers)
    _call(function, args, 0)
    _store_ordered(state + _GATE, 0)
    spins = 0
    while _load_ordered(state + _ACTIVE) != 0:
        spins += 1
        if spins < _END_SPINS:
            _pause()
        else:
            _yield_core()


def _call_each(args: Any, thread_index: Any) -> Any:
    """Take part in several kernels one after another: word 1 is their number, then (function, args) of each."""
    for index in range(load_i64(args + 8)):
        _call(load_i64(args + 16 + 16 * index), load_i64(args + 24 + 16 * index), thread_index)


def _run_launches(state: Any, launches: Any) -> Any:
    """Run a list of launches one after another: their number, then (function, args, how) of each."""
    mode = _exchange_float_mode(-_FLUSH_DENORMALS)
    for index in range(load_i64(launches)):
        launch = launches + 8 + 24 * index
        function, args, how = load_i64(launch), load_i64(launch + 8), load_i64(launch + 16)
        store_i64(args, 0)
        if how == TOGETHER:
            for member in range(load_i64(args + 8)):
                store_i64(load_i64(args + 24 + 16 * member), 0)
        if how == SERIAL:
            _call(function, args, 0)
        else:
            _region(state, function, args)
    _exchange_float_mode(mode)


class Recording(Protocol):
    """What hears of every launch while it is recorded."""

    def note(self, kernel: Kernel, args: npt.NDArray[np.int64], holds: Sequence[Any], how: int) -> None:
        """Remember a launch; `holds` are arrays that `args` name and that nobody else keeps."""

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return memory that lives as long as the record; other records use it too, but for the record's result."""

    def before_replay(self, refresh: Callable[[], None]) -> None:
        """Have `refresh` bring what depends on the inputs up to date before each repetition."""

    def give_up(self) -> None:
        """Say that something was done that launches do not hold: this record cannot be repeated."""


class WorkerPool:
    """Threads that run kernels together with the caller's own.

    `num_threads` counts the caller; None means the cores this process may use. Regions exclude each other, so any
    thread may call `run`. In a forked child, where the threads are not, everything raises DeviceLost.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = usable_cores() if num_threads is None else num_threads
        self._words = np.zeros(_STATE_WORDS + 8, np.int64)
        self._state = -(-self._words.ctypes.data // 64) * 64
        self._header = self._words[(self._state - self._words.ctypes.data) // 8 :]
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._recording: tuple[int, Recording] | None = None  # with the thread whose launches it hears of
        self._single = np.ones(4, np.int64)
        self._single_address = address_of(self._single)
        self._header[_NUM_WORKERS // 8] = self.num_threads - 1
        self._run_launches = compile_kernel(_run_launches, "run_launches")
        self._call_each = compile_kernel(_call_each, "call_each")
        work = compile_kernel(_work, "work")
        self._threads = [
            threading.Thread(target=_serve, args=(work, self._words, self._state, index), daemon=True)
            for index in range(1, self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        stop = (self._process, self._header, self._run_launches, self._state, self._threads)
        self._finalizer = weakref.finalize(self, _stop, *stop)

    def run(
        self, kernel: Kernel, args: npt.NDArray[np.int64], holds: Sequence[Any] = (), *, parallel: bool = True
    ) -> None:
        """Run a kernel over the items that `args` word 1 counts; return when all are done.

        `holds` are the arrays that `args` name and that the caller will not keep. A kernel that is not `parallel` runs
        on the caller's thread alone.
        """
        self._launch(kernel, args, holds, PARALLEL if parallel else SERIAL)

    def run_together(self, launches: Sequence[tuple[Kernel, npt.NDArray[np.int64]]], holds: Sequence[Any] = ()) -> None:
        """Run kernels that do not depend on each other as one region."""
        words = [0, len(launches)]
        for kernel, args in launches:
            words += (kernel.address, address_of(args))
        self._launch(self._call_each, np.array(words, np.int64), [*holds, *(args for _, args in launches)], TOGETHER)

    def _launch(self, kernel: Kernel, args: npt.NDArray[np.int64], holds: Sequence[Any], how: int) -> None:
        self._check_process()
        with self._lock:
            if self._recording is not None:
                self._recording[1].note(kernel, args, holds, how)
            words = self._single
            words[1], words[2], words[3] = kernel.address, address_of(args), how
            self._run_launches.call(self._state, self._single_address)

    def run_all(self, launches: npt.NDArray[np.int64]) -> None:
        """Run launches in their order, in one call: their number, then (function, args, how) of each."""
        self._check_process()
        with self._lock:
            self._run_launches.call(self._state, address_of(launches))

    def _check_process(self) -> None:
        """Refuse before any lock: the fork may have come while another thread held it."""
        if os.getpid() != self._process:
            raise DeviceLost("this process was forked from the one that has the worker threads; start it by `spawn`")

    @property
    def recording(self) -> Recording | None:
        """What hears of the calling thread's launches now, if anything does."""
        recording = self._recording
        return recording[1] if recording is not None and recording[0] == threading.get_ident() else None

    @contextmanager
    def record(self, recording: Recording) -> Iterator[None]:
        """Let `recording` hear of every launch; other threads wait meanwhile."""
        with self._lock:
            self._recording = threading.get_ident(), recording
            try:
                yield
            finally:
                self._recording = None

    def close(self) -> None:
        """End the threads; idempotent, and nothing in a forked child."""
        if os.getpid() == self._process:
            with self._lock:
                self._finalizer()


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array's first element lies; the array must outlive the use of it."""
    return int(array.__array_interface__["data"][0])


def _serve(work: Kernel, words: npt.NDArray[np.int64], state: int, index: int) -> None:
    work.call(state, index)  # `words` is held so that the state outlives the thread


def _nothing(args: Any, thread_index: Any) -> Any:
    pass


def _stop(
    process: int,
    header: npt.NDArray[np.int64],
    run_launches: Kernel,
    state: int,
    threads: list[threading.Thread],
) -> None:
    if os.getpid() != process:
        return
    header[_STOP // 8] = 1
    args = np.zeros(2, np.int64)
    launches = np.array([1, compile_kernel(_nothing, "nothing").address, address_of(args), 1], np.int64)
    run_launches.call(state, address_of(launches))
    for thread in threads:
        thread.join()
