"""Compiles kernels to machine code and keeps the code on disk, so that only a first start compiles.

A kernel is a numba function `void(int64 args_address, int64 thread_index)`, compiled to a C callback: it runs
without the GIL and can be called by address from other compiled code.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import bytecode, ccallback, compiler, serialize

from pagedkv.compute.cpu import features, simd, simd_emit
from pagedkv.unfinished import replace_file

_SIGNATURE = types.void(types.int64, types.int64)
_C_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
_SHARED_SOURCES = (simd.__file__, simd_emit.__file__, __file__)

_log = logging.getLogger(__name__)
_said: set[str] = set()
_loaded: dict[str, Kernel] = {}  # machine code is never unloaded, so a process holds each kernel once

features.hold_code_generation()


@dataclass(frozen=True, slots=True)
class Kernel:
    """Machine code of one kernel: its address, and a callable that releases the GIL while it runs."""

    name: str
    address: int
    call: Callable[[int, int], None]
    owner: Any  # keeps the code alive


def compile_kernel(
    function: Callable[[Any, Any], Any], name: str, config: Sequence[object] = (), sources: Sequence[str] = ()
) -> Kernel:
    """Compile a kernel, or load it from disk.

    `config` holds every value that the function closes over (closures are not looked into); `sources` are the files,
    besides the function's own and the vector operations, whose text the code depends on.
    """
    files = (*_SHARED_SOURCES, function.__code__.co_filename, *sources)
    key = repr((name, tuple(config), _digest_of_files(tuple(sorted(set(files))))))
    if key in _loaded:
        return _loaded[key]
    callback: Any = ccallback.CFunc(function, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {"error_model": "numpy"})
    callback._cache = _DiskCache(name, key)
    with _own_symbols(key):
        callback.compile()
    _loaded[key] = Kernel(name, callback.address, _C_TYPE(callback.address), callback)
    return _loaded[key]


@contextmanager
def _own_symbols(key: str) -> Iterator[None]:
    """Number the functions compiled meanwhile from a place of the kernel's own.

    Numba puts the number into the names of machine code, counting in each process from 1. Kernels that different
    processes compiled would otherwise bring functions of one name, of which only the first loaded is ever called.
    """
    usual = bytecode.FunctionIdentity._unique_ids
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "little") << 12
    bytecode.FunctionIdentity._unique_ids = itertools.count(start)
    try:
        yield
    finally:
        bytecode.FunctionIdentity._unique_ids = usual


def cache_folder() -> Path:
    """Return where compiled kernels are kept: under NUMBA_CACHE_DIR, else in the user's cache directory."""
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(configured) / "pagedkv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "kernels"


class _DiskCache:
    """numba's cache interface over one checked file a kernel; a damaged file is rebuilt, a failing disk bypassed."""

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self._key = key

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        path = self._path(target_context.codegen())
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return _say_once(f"the compile cache cannot be read ({error}); kernels are compiled at every start")
        digest, payload = stored[:32], stored[32:]
        if hashlib.sha256(payload).digest() != digest:
            return _say_once(f"the compile cache is damaged ({path}); it is rebuilt")
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, signature: Any, result: Any) -> None:
        path = self._path(result.codegen)
        payload = serialize.dumps(result._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            _say_once(f"the compile cache cannot be written ({error}); kernels are compiled at every start")

    def _path(self, codegen: Any) -> Path:
        versions = (numba.__version__, llvmlite.__version__, sys.version_info[:2])
        text = repr((self._key, codegen.magic_tuple(), versions))
        return cache_folder() / f"{self._name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.kernel"


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)


@cache
def _digest_of_files(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()
