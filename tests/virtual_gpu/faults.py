"""What the virtual GPU says when a program is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field


class UnsupportedPtx(Exception):
    """The module holds an instruction or directive that the virtual GPU does not model; names it and its line."""


@dataclass
class GpuFault(Exception):
    """One fault of a program, with everything known about where it happened."""

    kind: str  # "out of bounds", "misaligned", "uninitialised read", "race", "barrier", ...
    message: str
    kernel: str = ""
    ptx_line: int = 0
    ptx: str = ""
    source: str = ""  # "file:line" when the module was compiled with -lineinfo
    thread: str = ""
    address: int | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = [f"kernel {self.kernel}"] if self.kernel else []
        if self.ptx_line:
            where.append(f"PTX line {self.ptx_line} `{self.ptx}`")
        if self.source:
            where.append(f"source {self.source}")
        if self.thread:
            where.append(self.thread)
        if self.address is not None:
            where.append(f"address {self.address:#x}")
        return "; ".join([f"{self.kind}: {self.message}", *where, *self.notes])
