"""A GPU made of NumPy arrays: executes the PTX of this project's kernels behind the driver API's names."""

from virtual_gpu.counters import LaunchStats
from virtual_gpu.faults import GpuFault, UnsupportedPtx
from virtual_gpu.profile import SM_80, SM_90, Profile
from virtual_gpu.virtual_driver import VirtualDriver

__all__ = ["SM_80", "SM_90", "GpuFault", "LaunchStats", "Profile", "UnsupportedPtx", "VirtualDriver"]
