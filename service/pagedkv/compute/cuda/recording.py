"""What a step notes of itself while it is recorded, so that it can be repeated with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.errors import DeviceError


class Recording:
    """Host arrays that a step uploads besides its inputs, and checks of its inputs.

    The first run uploads its constants; the run under capture must ask for the same ones in the same order and gets
    what lies on the device, for a graph must not read host memory that others write to later.
    """

    def __init__(self) -> None:
        self._constants: list[tuple[npt.NDArray[Any], DeviceArray]] = []
        self._checks: dict[Hashable, Callable[[], None]] = {}
        self._num_reused = 0
        self.is_capturing = False

    def begin_capture(self) -> None:
        """From now on constants are those of the first run."""
        self.is_capturing = True

    def constant(self, array: npt.NDArray[Any], upload: Callable[[npt.NDArray[Any]], DeviceArray]) -> DeviceArray:
        """Return the array on the device. Raises DeviceError under capture if the first run had another one here."""
        if not self.is_capturing:
            self._constants.append((array.copy(), upload(array)))
            return self._constants[-1][1]
        if self._num_reused < len(self._constants):
            known, tensor = self._constants[self._num_reused]
            self._num_reused += 1
            if known.dtype == array.dtype and np.array_equal(known, array):
                return tensor
        raise DeviceError("a repeated step uploads other arrays than its first run did")

    def check(self, key: Hashable, check: Callable[[], None]) -> None:
        """Run a check of the inputs once now, and before each repetition. Raises what it raises."""
        if key not in self._checks and not self.is_capturing:
            check()
            self._checks[key] = check

    def run_checks(self) -> None:
        """Check the inputs of a repetition."""
        for check in self._checks.values():
            check()
