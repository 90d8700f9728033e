"""NVRTC: CUDA C to CUBIN for a device's own architecture, or to PTX; cached in process and on disk."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pagedkv.compute.cuda.driver import unwrap
from pagedkv.compute.cuda.kernels import Variant
from pagedkv.errors import DeviceError
from pagedkv.unfinished import replace_file

OnCompile = Callable[[int, int, str], None]
MOST_THREADS = 16  # that compile at the same time
OLDEST = 80  # cp.async and mma.sync m16n8k16 of bfloat16 need sm_80
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for: `arch` is the compute capability as in sm_90; PTX where `is_ptx`."""

    arch: int
    is_ptx: bool = False

    @property
    def option(self) -> str:
        """The compiler's name of it."""
        return f"{'compute' if self.is_ptx else 'sm'}_{self.arch}"


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of a kernel."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int  # static only


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel and the compiler's log."""

    image: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Read registers and spills from the log; only a CUBIN's log has them."""
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", self.log)]
        return Resources(
            _figure(r"Used (\d+) registers", self.log),
            sum(spills),
            _figure(r"(\d+) bytes stack frame", self.log),
            _figure(r"(\d+) bytes smem", self.log),
        )


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def source_directory() -> Path:
    """Return where the kernels' sources lie: in the wheel, or in a checkout. Raises DeviceError."""
    here = Path(__file__).resolve()
    for candidate in (here.parent / "cudasrc", here.parents[4] / "cudasrc"):
        if (candidate / "attend.cu").is_file():
            return candidate
    raise DeviceError("the kernels' sources (cudasrc/) are not installed")


def choose_target(capability: tuple[int, int], supported: list[int]) -> Target:
    """Return what to compile for a device of this capability, given what the compiler supports.

    The device's own architecture where the compiler knows it; else the nearest lower one of the same major version
    (CUBIN runs on later minors), else PTX of the newest the compiler knows, which the driver finishes. Raises
    DeviceError for a device that the kernels cannot run on.
    """
    arch = capability[0] * 10 + capability[1]
    if arch < OLDEST:
        raise DeviceError(f"compute capability {capability[0]}.{capability[1]} is too old: 8.0 is the oldest supported")
    lower = [known for known in supported if OLDEST <= known <= arch]
    if not lower:
        raise DeviceError(f"NVRTC supports none of sm_{OLDEST} to sm_{arch}")
    nearest = max(lower)
    return Target(nearest, is_ptx=nearest // 10 != arch // 10)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pagedkv" / "kernels"


class Compiler:
    """Compiles variants; `cache_dir` None means the user's cache. Safe to use from several threads."""

    def __init__(self, nvrtc: Any = None, cache_dir: Path | None = None) -> None:
        if nvrtc is None:
            from cuda.bindings import nvrtc as bindings

            nvrtc = bindings
        self._nvrtc = nvrtc
        self._cache_dir = cache_dir or _default_cache()
        self._held: dict[str, Binary] = {}
        self._busy: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        try:
            self.version: tuple[int, int] = unwrap(nvrtc.nvrtcVersion(), "nvrtcVersion")
        except RuntimeError as error:
            raise DeviceError(f"NVRTC is not there: {error}; install pagedkv[cuda]") from error
        self.num_compiled = 0

    def supported_archs(self) -> list[int]:
        """Return the architectures this NVRTC knows."""
        return [int(arch) for arch in unwrap(self._nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")]

    def compile(self, variant: Variant, target: Target) -> Binary:
        """Return the binary, from the cache where possible. Raises DeviceError with source, options and log."""
        options = self._options(variant, target)
        key = self._key(variant.name, options)
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:  # different variants compile at the same time
            if key not in self._held:
                self._held[key] = self._load(key) or self._compile_and_store(variant.name, options, target, key)
            return self._held[key]

    def recompile(self, variant: Variant, target: Target) -> Binary:
        """Return a fresh binary in the place of a cached one that does not load. Raises as `compile`."""
        options = self._options(variant, target)
        key = self._key(variant.name, options)
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            self._held[key] = self._compile_and_store(variant.name, options, target, key)
            return self._held[key]

    def compile_all(self, variants: Sequence[Variant], target: Target, on_compile: OnCompile) -> dict[str, DeviceError]:
        """Compile variants on all cores; return what failed by label. `on_compile(done, total, name)` hears of each."""
        wrong: dict[str, DeviceError] = {}

        def attempt(variant: Variant) -> DeviceError | None:
            try:
                self.compile(variant, target)
            except DeviceError as error:
                return error
            return None

        with ThreadPoolExecutor(min(MOST_THREADS, max(2, os.cpu_count() or 1))) as pool:
            for done, (variant, error) in enumerate(zip(variants, pool.map(attempt, variants), strict=True)):
                on_compile(done, len(variants), variant.label)
                if error is not None:
                    wrong[variant.label] = error
        on_compile(len(variants), len(variants), "")
        return wrong

    def _options(self, variant: Variant, target: Target) -> tuple[str, ...]:
        macros = [f"-D{name}={value}" for name, value in variant.macros]
        extra = ["-lineinfo"] if target.is_ptx else ["--ptxas-options=-v"]
        return (f"--gpu-architecture={target.option}", "--std=c++17", *extra, *macros)

    def _key(self, name: str, options: tuple[str, ...]) -> str:
        text = "\0".join([_digest(f"{name}.cu"), *options, str(self.version)])
        return hashlib.sha256(text.encode()).hexdigest()

    def _load(self, key: str) -> Binary | None:
        """Return a cached binary, None for one that is not there or not as it was written."""
        try:
            image = (self._cache_dir / f"{key}.bin").read_bytes()
            digest, _, log = (self._cache_dir / f"{key}.log").read_text().partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        return Binary(image, log) if digest == hashlib.sha256(image).hexdigest() else None

    def _compile_and_store(self, name: str, options: tuple[str, ...], target: Target, key: str) -> Binary:
        binary = self._compile(name, options, target)
        try:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(binary.image).hexdigest()
            replace_file(self._cache_dir / f"{key}.log", f"{digest}\n{binary.log}".encode())
            replace_file(self._cache_dir / f"{key}.bin", binary.image)
        except OSError:
            pass  # a cache that cannot be written costs time only
        return binary

    def _compile(self, name: str, options: tuple[str, ...], target: Target) -> Binary:
        nvrtc, file = self._nvrtc, f"{name}.cu"
        headers = {header: _read(header) for header in _headers(file)}
        program = unwrap(
            nvrtc.nvrtcCreateProgram(
                _read(file).encode(),
                file.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [header.encode() for header in headers],
            ),
            "nvrtcCreateProgram",
        )
        try:
            result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            log = self._fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0\n ")
            if int(result[0]) != 0:
                raise DeviceError(f"{file} does not compile with {' '.join(options)}:\n{log}", source=file)
            with self._lock:
                self.num_compiled += 1
            return Binary(self._fetch(program, "PTX" if target.is_ptx else "CUBIN"), log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _fetch(self, program: Any, what: str) -> bytes:
        size = unwrap(getattr(self._nvrtc, f"nvrtcGet{what}Size")(program), f"nvrtcGet{what}Size")
        buffer = bytearray(size)  # not `b" " * size`: for size 1 that is the interpreter's own constant
        unwrap(getattr(self._nvrtc, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return bytes(buffer)


@cache
def _read(file: str) -> str:
    return (source_directory() / file).read_text()


@cache
def _headers(file: str) -> tuple[str, ...]:
    """Return every header that a source includes, directly or not."""
    found: list[str] = []
    for header in _INCLUDE.findall(_read(file)):
        found += [name for name in (header, *_headers(header)) if name not in found]
    return tuple(found)


@cache
def _digest(file: str) -> str:
    return hashlib.sha256("\0".join([_read(file), *(_read(name) for name in _headers(file))]).encode()).hexdigest()
