"""Steps captured as CUDA graphs and replayed: one copy of the inputs and one launch stand for hundreds of calls.

A step's number of rows is padded to a power of two, its bucket. On first use of a bucket the step runs once as it is
(which compiles kernels, uploads constants and takes all the memory it needs), then once more under capture; every use
after that fills the bucket's input buffer and launches the graph. What depends on lengths is decided on the device.
Rows of padding name no slot and no block, so a bucket needs nothing of the page pool, however full that is.

A capture that fails (for want of memory, for example) is tried again: at the next step of the bucket, then after 1, 3,
7 steps and so on; until then such steps run as they are. All of this is counted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.device import Device
from pagedkv.compute.cuda.recording import Recording
from pagedkv.errors import DeviceError, DeviceLost, InvalidArgument

Arrays = Sequence[npt.NDArray[Any]]
Body = Callable[[Arrays], DeviceArray]

MAX_GRAPH_ROWS: Final = 64  # by default; a step of more keeps the device busy without
MOST_GRAPHS: Final = 64  # the longest unused one goes
MOST_PATIENCE: Final = 255  # steps between two attempts to capture
_ALIGNMENT: Final = 16

_log = logging.getLogger(__name__)


class Inputs:
    """A bucket's inputs: arrays over one host buffer, and over one device buffer of the same layout."""

    def __init__(self, device: Device, num_rows: int, given: Arrays) -> None:
        shapes = [(num_rows, *array.shape[1:]) for array in given]
        sizes = [int(np.prod(shape)) * array.itemsize for shape, array in zip(shapes, given, strict=True)]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        self._packed = np.zeros(starts[-1], np.uint8)
        self._memory = device.scratch.empty(self._packed.shape, np.uint8)
        self.host: list[npt.NDArray[Any]] = []
        self.device: list[DeviceArray] = []
        for shape, size, start, array in zip(shapes, sizes, starts, given, strict=False):
            self.host.append(self._packed[start : start + size].view(array.dtype).reshape(shape))
            self.device.append(DeviceArray(self._memory.pointer + start, shape, array.dtype, self._memory))

    def fill(self, given: Arrays, padding: Sequence[int]) -> None:
        """Take over the rows given; `padding` has each array's value for the others, if there are others."""
        for number, (mine, array) in enumerate(zip(self.host, given, strict=True)):
            mine[: len(array)] = array
            if len(array) < len(mine):
                mine[len(array) :] = padding[number]

    def send(self, device: Device) -> None:
        """Enqueue the copy to the device."""
        device.copy_in(self._memory.pointer, self._packed, device.streams.compute)


class _Step:
    """One bucket of one step: its inputs, its record and, once captured, its graph and result."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.recording = inputs, Recording()
        self.graph: Any = None
        self.result: DeviceArray


@dataclass(slots=True)
class _Failed:
    """A bucket that could not be captured: how many steps are to run as they are until the next attempt."""

    patience: int = 0
    left: int = 0


class StepGraphs:
    """The captured steps of one device; used from jobs. `max_rows` 0 captures nothing.

    Counters since the start: `num_captured`, `num_failed` captures, `num_replayed` steps, and `num_fallbacks`, steps
    that ran without their graph because its capture had failed.
    """

    def __init__(self, device: Device, max_rows: int) -> None:
        self._device, self._driver, self._max_rows = device, device.driver, max_rows
        # Apart from the scratch memory of other jobs: a replay writes to it behind the allocator's back. Graphs run
        # one after another on one stream, so they share it.
        self._memory = device.new_scratch()
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()
        self._failed: OrderedDict[Hashable, _Failed] = OrderedDict()
        self.num_captured = self.num_failed = self.num_replayed = self.num_fallbacks = 0

    @property
    def allocated_bytes(self) -> int:
        """Device memory that is set aside for graphs."""
        return self._memory.allocated_bytes

    def run(self, shape: Hashable, given: Arrays, padding: Sequence[int], body: Body) -> DeviceArray:
        """See `Backend.repeat`; steps of more than `max_rows` rows are run as they are."""
        num_rows = len(given[0])
        if not 0 < num_rows <= self._max_rows:
            return body(given)
        bucket = 1 << (num_rows - 1).bit_length() if padding else num_rows
        key = (shape, bucket, tuple((array.shape[1:], array.dtype) for array in given))
        if key not in self._steps and not self._try_capture(key, bucket, given, padding, body):
            self.num_fallbacks += 1
            return body(given)
        self._steps.move_to_end(key)
        step = self._steps[key]
        self.num_replayed += 1
        step.inputs.fill(given, padding)
        step.recording.run_checks()
        step.inputs.send(self._device)
        self._driver.call("cuGraphLaunch", step.graph, self._device.streams.compute)
        return step.result[:num_rows]

    def _add(self, key: Hashable, step: _Step) -> None:
        if len(self._steps) >= MOST_GRAPHS:
            oldest = self._steps.popitem(last=False)[1]
            self._device.queue.at_completion(lambda: self._destroy(oldest))  # it may be running
        self._steps[key] = step

    def _try_capture(self, key: Hashable, bucket: int, given: Arrays, padding: Sequence[int], body: Body) -> bool:
        """Return whether the step is captured now; where that failed a short while ago, do not try.

        Raises InvalidArgument for inputs that the step refuses, DeviceLost.
        """
        failed = self._failed.get(key)
        if failed is not None and failed.left:
            failed.left -= 1
            return False
        try:
            self._add(key, self._capture(bucket, given, padding, body))
        except (InvalidArgument, DeviceLost):
            raise
        except Exception:  # of the driver, of cuBLAS, of a body that is not repeatable
            self._note_failure(key, bucket)
            return False
        self._failed.pop(key, None)
        return True

    def _note_failure(self, key: Hashable, bucket: int) -> None:
        self.num_failed += 1
        if key not in self._failed:
            _log.warning(
                "steps of %d rows cannot be captured as a graph for now and run without", bucket, exc_info=True
            )
            while len(self._failed) >= MOST_GRAPHS:
                self._failed.popitem(last=False)
            self._failed[key] = _Failed()
            return
        failed = self._failed[key]
        failed.left = failed.patience = min(2 * failed.patience + 1, MOST_PATIENCE)

    def _capture(self, bucket: int, given: Arrays, padding: Sequence[int], body: Body) -> _Step:
        step = _Step(Inputs(self._device, bucket, given))
        step.inputs.fill(given, padding)
        step.inputs.send(self._device)
        self._run(step, body)
        with self._capturing(step):
            result = self._run(step, body)
        step.result = DeviceArray(result.pointer, result.shape, result.dtype, self)  # its memory serves other steps too
        self.num_captured += 1
        return step

    def _run(self, step: _Step, body: Body) -> DeviceArray:
        inputs: dict[Hashable, tuple[Any, Any]] = {
            id(host): (host, mine) for host, mine in zip(step.inputs.host, step.inputs.device, strict=True)
        }
        with self._device.recorded(step.recording, inputs, self._memory):
            return body(step.inputs.host)

    @contextmanager
    def _capturing(self, step: _Step) -> Iterator[None]:
        """Capture what is enqueued on the compute stream, and make it the step's graph."""
        stream = self._device.streams.compute
        mode = self._driver.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._driver.call("cuStreamBeginCapture", stream, mode)
        step.recording.begin_capture()
        try:
            yield
        except BaseException:
            with suppress(DeviceError):  # the capture ends in any case; what broke it is the error to report
                self._driver.call("cuGraphDestroy", self._driver.call("cuStreamEndCapture", stream))
            raise
        graph = self._driver.call("cuStreamEndCapture", stream)
        try:
            step.graph = self._driver.call("cuGraphInstantiate", graph, 0)
        finally:
            self._driver.call("cuGraphDestroy", graph)

    def _destroy(self, step: _Step) -> None:
        self._driver.call("cuGraphExecDestroy", step.graph)

    def release(self) -> None:
        """Destroy all graphs and free their memory; the device must be idle."""
        while self._steps:
            self._destroy(self._steps.popitem()[1])
        self._memory.release()
