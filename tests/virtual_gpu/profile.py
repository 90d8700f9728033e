"""What device the virtual GPU pretends to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Figures that the driver reports and enforces."""

    name: str = "Virtual GPU (sm_80)"
    capability: tuple[int, int] = (8, 0)
    driver_version: int = 99_000  # takes the PTX of any compiler
    num_sms: int = 108
    memory_bytes: int = 1 << 30
    host_bytes: int = 256 << 20  # pinned memory there is to hand out
    shared_per_block: int = 48 << 10
    shared_per_block_optin: int = 163 << 10
    shared_per_sm: int = 164 << 10
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    l2_bytes: int = 40 << 20


SM_80 = Profile()
SM_90 = Profile(
    "Virtual GPU (sm_90)",
    (9, 0),
    num_sms=132,
    shared_per_block_optin=227 << 10,
    shared_per_sm=228 << 10,
    l2_bytes=50 << 20,
)
# So small that a few dozen tokens fill it: what a large device does with thousands of them happens here with few.
TWO_SMS = Profile("Virtual GPU (two SMs)", num_sms=2, memory_bytes=64 << 20, host_bytes=64 << 20)
