"""The CUDA driver API behind one door: every result is unwrapped here, every failure becomes a DeviceError.

Statuses of `_PASSING` end what was being done and leave the device as it was. Every other one, those that nobody knows
yet included, is a DeviceLost: an error of earlier work that the context keeps for ever, or a handle gone wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import DeviceError, DeviceLost

_PASSING = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "INVALID_VALUE",
        "OUT_OF_MEMORY",
        "LAUNCH_OUT_OF_RESOURCES",
        "COOPERATIVE_LAUNCH_TOO_LARGE",
        "INVALID_CLUSTER_SIZE",
        "NOT_FOUND",
        "NOT_READY",
        "NOT_PERMITTED",
        "NOT_SUPPORTED",
        "OPERATING_SYSTEM",
        "HOST_MEMORY_ALREADY_REGISTERED",
        "HOST_MEMORY_NOT_REGISTERED",
        # the device or the driver is not there, or not for us: nothing was begun
        "STUB_LIBRARY",
        "CALL_REQUIRES_NEWER_DRIVER",
        "NO_DEVICE",
        "INVALID_DEVICE",
        "DEVICE_NOT_LICENSED",
        "DEVICE_UNAVAILABLE",
        "SYSTEM_NOT_READY",
        "SYSTEM_DRIVER_MISMATCH",
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "INSUFFICIENT_LOADER_VERSION",
        "PEER_ACCESS_UNSUPPORTED",
        # a module that is not taken
        "INVALID_IMAGE",
        "INVALID_PTX",
        "INVALID_SOURCE",
        "NO_BINARY_FOR_GPU",
        "UNSUPPORTED_PTX_VERSION",
        "JIT_COMPILER_NOT_FOUND",
        "JIT_COMPILATION_DISABLED",
        "FILE_NOT_FOUND",
        "SHARED_OBJECT_SYMBOL_NOT_FOUND",
        "SHARED_OBJECT_INIT_FAILED",
        "FUNCTION_NOT_LOADED",
        # a capture that fails, or a graph
        "STREAM_CAPTURE_UNSUPPORTED",
        "STREAM_CAPTURE_INVALIDATED",
        "STREAM_CAPTURE_MERGE",
        "STREAM_CAPTURE_UNMATCHED",
        "STREAM_CAPTURE_UNJOINED",
        "STREAM_CAPTURE_ISOLATION",
        "STREAM_CAPTURE_IMPLICIT",
        "STREAM_CAPTURE_WRONG_THREAD",
        "CAPTURED_EVENT",
        "GRAPH_EXEC_UPDATE_FAILURE",
        "GRAPH_RECAPTURE_FAILURE",
    )
)
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


def error_of(what: str, status: str, detail: str = "") -> DeviceError:
    """Return the error for a status by its name: DeviceLost unless it leaves the device as it was."""
    is_final = status.startswith("CUDA_ERROR_") and status not in _PASSING
    text = f"{what}: {status}{f' ({detail})' if detail else ''}"
    return (DeviceLost if is_final else DeviceError)(text, call=what, code=status)


def is_out_of_memory(error: DeviceError) -> bool:
    """Whether the driver had no memory to give."""
    return error.details.get("code") == OUT_OF_MEMORY


def unwrap(result: tuple[Any, ...], what: str, detail: str = "") -> Any:
    """Return what follows the status of a driver or NVRTC call: None, one value, or a tuple.

    Raises DeviceError, or DeviceLost, naming the call, the status and `detail`.
    """
    status = result[0]
    if int(status) != 0:
        raise error_of(what, _name_of(status), detail)
    values = result[1:]
    return None if not values else values[0] if len(values) == 1 else values


def _name_of(status: Any) -> str:
    """Return a status' name; one that the bindings do not know yet is a driver's all the same."""
    return getattr(status, "name", None) or f"CUDA_ERROR_{int(status)}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is known of a device."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    shared_bytes: int  # that a CTA may have


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether CUDA can be used here: its devices, or the reason why there are none."""

    devices: tuple[DeviceInfo, ...]
    reason: str
    driver_version: int = 0


class Driver:
    """`cuda.bindings.driver`, or a module with its names, with unwrapped results."""

    def __init__(self, module: Any = None) -> None:
        if module is None:
            from cuda.bindings import driver

            module = driver
        self.module = module

    def call(self, name: str, *args: Any) -> Any:
        """Call a driver function and unwrap its result. Raises DeviceError, or DeviceLost where that is final."""
        try:
            result = getattr(self.module, name)(*args)
        except RuntimeError as error:  # the library itself, or a function of it, is not there
            if name == "cuInit":
                raise DeviceError("no NVIDIA driver here", call=name) from error
            raise DeviceError(f"{name}: {error}", call=name) from error
        detail = "" if int(result[0]) == 0 or name == "cuInit" else self._error_text(result[0])
        return unwrap(result, name, detail)

    def _error_text(self, status: Any) -> str:
        try:
            code, text = self.module.cuGetErrorString(status)
        except (RuntimeError, AttributeError):
            return ""
        return "" if int(code) != 0 or text is None else text.decode() if isinstance(text, bytes) else str(text)

    def attribute(self, device: Any, name: str) -> int:
        """Return a device attribute by the end of its enum's name."""
        kind = getattr(self.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", kind, device))

    def describe(self, ordinal: int) -> DeviceInfo:
        """Return what is known of a device; cuInit must have run."""
        device = self.call("cuDeviceGet", ordinal)
        name = self.call("cuDeviceGetName", 256, device)
        major = self.attribute(device, "COMPUTE_CAPABILITY_MAJOR")
        minor = self.attribute(device, "COMPUTE_CAPABILITY_MINOR")
        return DeviceInfo(
            ordinal,
            (name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0").strip(),
            (major, minor),
            self.attribute(device, "MULTIPROCESSOR_COUNT"),
            int(self.call("cuDeviceTotalMem", device)),
            self.attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )


def probe(module: Any = None) -> Probe:
    """Look for devices; never raises where driver, device or package is missing."""
    try:
        driver = Driver(module)
        driver.call("cuInit", 0)
        version = int(driver.call("cuDriverGetVersion"))
        count = int(driver.call("cuDeviceGetCount"))
        devices = tuple(driver.describe(ordinal) for ordinal in range(count))
    except (ImportError, DeviceError) as error:
        return Probe((), " ".join(str(error).split()))
    return Probe(devices, "" if devices else "the driver reports no device", version)


def require_driver(driver_version: int, compiler_version: tuple[int, int], is_ptx: bool) -> None:
    """Raise DeviceError if a driver, as by cuDriverGetVersion, does not take what a version of NVRTC compiles.

    CUBINs run on every driver of the compiler's major version; PTX needs a driver at least as new as the compiler.
    """
    have = (driver_version // 1000, driver_version % 1000 // 10)
    need = compiler_version if is_ptx else (compiler_version[0], 0)
    if have < need:
        code = "PTX" if is_ptx else "CUBINs"
        message = (
            f"the driver is too old: it supports CUDA {have[0]}.{have[1]}, and {code} of NVRTC "
            f"{compiler_version[0]}.{compiler_version[1]} need {need[0]}.{need[1]}; update the driver"
        )
        raise DeviceError(message, driver_version=f"{have[0]}.{have[1]}", needed_version=f"{need[0]}.{need[1]}")


class Context:
    """A device's primary context. Threads of our own bind it; on a caller's thread it is pushed for a while."""

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        driver.call("cuInit", 0)
        self.driver, self.info = driver, driver.describe(ordinal)
        self._device = driver.call("cuDeviceGet", ordinal)
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)

    def bind(self) -> None:
        """Make the context current on the calling thread."""
        self.driver.call("cuCtxSetCurrent", self._context)

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """Make the context current on a thread that may have another one, which is current again afterwards."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with suppress(DeviceError):  # what was done meanwhile is done
                self.driver.call("cuCtxPopCurrent")

    def retain(self) -> None:
        """Keep the context alive until one more `release`."""
        self.driver.call("cuDevicePrimaryCtxRetain", self._device)

    def release(self) -> None:
        """Give the context back; nothing made in it may be used after."""
        self.driver.call("cuDevicePrimaryCtxRelease", self._device)


_KINDS = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}


class Function:
    """A kernel and its parameters' widths: `signature` has a letter each, P pointer, q int64, i int32, f float."""

    def __init__(self, driver: Driver, handle: Any, signature: str, shared_bytes: int) -> None:
        self._driver, self._handle, self._shared_bytes = driver, handle, shared_bytes
        self._kinds = tuple(_KINDS[letter] for letter in signature)
        self._ctas_per_sm: dict[int, int] = {}
        if shared_bytes > 0:
            kinds = driver.module.CUfunction_attribute
            driver.call(
                "cuFuncSetAttribute", handle, kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
            carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.call("cuFuncSetAttribute", handle, carveout, 100)  # per cent: as many CTAs on an SM as fit

    def ctas_per_sm(self, num_threads: int) -> int:
        """Return how many CTAs of as many threads an SM holds at once; at least 1."""
        if num_threads not in self._ctas_per_sm:
            args = (self._handle, num_threads, self._shared_bytes)
            found = int(self._driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", *args))
            self._ctas_per_sm[num_threads] = max(1, found)
        return self._ctas_per_sm[num_threads]

    def launch(self, grid: tuple[int, int, int], num_threads: int, stream: Any, *args: float) -> None:
        """Enqueue a launch; the driver copies the arguments before it returns. Raises DeviceError."""
        assert len(args) == len(self._kinds), f"{len(args)} arguments for {len(self._kinds)} parameters"
        values = tuple(
            value if kind is ctypes.c_float else int(value) for value, kind in zip(args, self._kinds, strict=True)
        )
        self._driver.call(
            "cuLaunchKernel",
            self._handle,
            *grid,
            num_threads,
            1,
            1,
            self._shared_bytes,
            stream,
            (values, self._kinds),
            0,
        )
