"""The inner loops of memory access, compiled by numba: bounds, initialisation, races, sectors and bank conflicts.

Shadow memory holds one state per byte. Race marks cover two bytes each (accesses of a single byte are not checked
for races). A check returns (code, index of the lane, byte offset, other CTA or thread); code 0 means all is well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

UNALLOCATED, FREED, UNINITIALISED, INITIALISED, IN_FLIGHT = 0, 1, 2, 3, 4
OK, OUT_OF_BOUNDS, MISALIGNED, RACE = 0, 10, 11, 12  # codes besides the states above
READ, WRITE, READ_WARP, ATOMIC, WRITE_LATER, READ_POISON = range(6)  # kinds of access
REQUESTS, SECTORS, NEW_SECTORS, WAVEFRONTS, IDEAL_WAVEFRONTS, LANES = range(6)  # columns of an instruction's counters

_WARP_READERS, _CTA_READERS = 1 << 20, 1 << 21
_FIELD, _WARP_SHIFT, _CTA_SHIFT = (1 << 22) - 1, 22, 44


_ALL_INITIALISED = np.uint32(0x03030303)


@njit(cache=True, nogil=True)
def _is_initialised(shadow4: Any, offset: int, nbytes: int) -> bool:
    """Whether an aligned access of 4 bytes or more touches only initialised bytes (the usual case, told fast)."""
    if nbytes < 4:
        return False
    for w in range(offset >> 2, (offset + nbytes) >> 2):  # noqa: SIM110 (numba has no all())
        if shadow4[w] != _ALL_INITIALISED:
            return False
    return True


@njit(cache=True, nogil=True)
def _state_error(shadow: Any, offset: int, nbytes: int, is_read: bool) -> int:
    """Return the first bad state plus one, or 0."""
    for b in range(nbytes):
        state = shadow[offset + b]
        if state < UNINITIALISED or (is_read and state != INITIALISED) or state == IN_FLIGHT:
            return state + 1
    return 0


@njit(cache=True, nogil=True)
def _global_race(
    offset: int, nbytes: int, kind: int, tag: int, base: int, many: int, writer: Any, reader: Any, ordered: Any
) -> int:
    """Return the CTA (plus one) that touched these bytes unordered in this launch, or 0; leave this CTA's mark."""
    cta = tag - base
    has_order = ordered.shape[0] > 1
    for g in range(offset >> 1, (offset + nbytes) >> 1):
        w = writer[g]
        if w >= base and w != tag and not (has_order and ordered[w - base, cta]):
            return w - base + 1
        r = reader[g]
        if kind in (READ, READ_POISON):
            if r < base:
                reader[g] = tag
            elif r != tag:
                reader[g] = many
        elif kind == WRITE:
            if r >= base and r != tag and not has_order:
                return (r - base + 1) if r != many else 1 << 30
            if r >= base and r != tag and r != many and not ordered[r - base, cta]:
                return r - base + 1
            writer[g] = tag
    return 0


@njit(cache=True, nogil=True)
def check_global(
    address,
    lanes,
    nbytes,
    kind,
    limits,
    tags,
    flags,
    shadow,
    shadow4,
    writer,
    reader,
    ordered,
    owner,
    seen,
    totals,
    stats,
    offsets,
):  # type: ignore[no-untyped-def]
    """Check one access of every lane and fill `offsets` into the arena.

    `limits`: device base, device bytes, host base, host bytes (the host part of the arena follows the device part).
    `tags`: first tag of the launch, tag of lane 0's CTA, many, threads a CTA (padded), launch number.
    """
    device_base, device_size, host_base, host_size = limits
    base, first_tag, many, padded, launch = tags
    check_races, count = flags
    is_write = kind == WRITE
    direction = 1 if is_write else 0
    sectors = np.empty(64, np.int64)
    num_sectors, warp = 0, -1
    tag, tag_end = first_tag - 1, -1  # the CTA's mark, and the first lane of the next CTA
    for i in range(lanes.size):
        a, lane = address[i], lanes[i]
        if lane >= tag_end:
            cta = lane // padded
            tag, tag_end = first_tag + cta, (cta + 1) * padded
        offset = np.int64(a - device_base)
        if offset < 0 or offset >= device_size:
            offset = np.int64(a - host_base)
            if offset < 0 or offset >= host_size:
                return OUT_OF_BOUNDS, i, a, 0
            offset += device_size
        if a & (nbytes - 1):
            return MISALIGNED, i, a, 0
        is_settled = _is_initialised(shadow4, offset, nbytes)
        if not is_settled:
            bad = _state_error(shadow, offset, nbytes, not is_write and kind != READ_POISON)
            if bad:
                return bad - 1 if bad > 1 else OUT_OF_BOUNDS, i, a, 0
        offsets[i] = offset
        if check_races and nbytes > 1:
            other = _global_race(offset, nbytes, kind, tag, base, many, writer, reader, ordered)
            if other:
                return RACE, i, a, other - 1
        if is_write and not is_settled:
            for b in range(nbytes):
                shadow[offset + b] = INITIALISED
        if not count:
            continue
        if lane >> 5 != warp:
            warp, num_sectors = lane >> 5, 0
            stats[REQUESTS] += 1
        sector = offset >> 5
        known = False
        for s in range(num_sectors - 1, -1, -1):
            if sectors[s] == sector:
                known = True
                break
        if not known:
            sectors[num_sectors] = sector
            num_sectors += 1
            allocation = owner[offset >> 9]
            stats[SECTORS] += 1
            totals[allocation, 2 * direction] += 1
            if seen[direction, sector] != launch:
                seen[direction, sector] = launch
                stats[NEW_SECTORS] += 1
                totals[allocation, 2 * direction + 1] += 1
    stats[LANES] += lanes.size
    return OK, 0, 0, 0


@njit(cache=True, nogil=True)
def _conflicts(mark: int, cta_clock: int, warp_clock: int, lane: int) -> bool:
    """Whether an earlier access with this mark is not ordered before the present one."""
    if mark >> _CTA_SHIFT != cta_clock:
        return False
    field = mark & _FIELD
    if field & _CTA_READERS:
        return True
    same_time = ((mark >> _WARP_SHIFT) & _FIELD) == warp_clock
    if field & _WARP_READERS:
        return same_time or (field & (_WARP_READERS - 1)) != lane >> 5
    if field == lane:
        return False
    return same_time or field >> 5 != lane >> 5


@njit(cache=True, nogil=True)
def make_mark(cta_clock: int, warp_clock: int, field: int) -> int:
    return (cta_clock << _CTA_SHIFT) | (warp_clock << _WARP_SHIFT) | field


@njit(cache=True, nogil=True)
def _reader_mark(mark: int, cta_clock: int, warp_clock: int, lane: int, whole_warp: bool) -> int:
    own = make_mark(cta_clock, warp_clock, (_WARP_READERS | (lane >> 5)) if whole_warp else lane)
    if mark >> _CTA_SHIFT != cta_clock:
        return own
    field = mark & _FIELD
    if field & _CTA_READERS:
        return mark
    owner_warp = (field & (_WARP_READERS - 1)) if field & _WARP_READERS else field >> 5
    if owner_warp != lane >> 5:
        return make_mark(cta_clock, warp_clock, _CTA_READERS)
    if field == lane or ((mark >> _WARP_SHIFT) & _FIELD) != warp_clock:
        return own
    return make_mark(cta_clock, warp_clock, _WARP_READERS | (lane >> 5))


@njit(cache=True, nogil=True, inline="always")
def _count_banks(bank_words, bank_fill, used, deepest, offset, nbytes):  # type: ignore[no-untyped-def]
    """Add an access to the present wavefront; return the mask of banks used and the deepest bank."""
    for w in range(offset >> 2, (offset + nbytes + 3) >> 2):
        bank = w & 31
        if not (used >> bank) & 1:
            used |= 1 << bank
            bank_fill[bank] = 1
            bank_words[0, bank] = w
            deepest = max(deepest, 1)
            continue
        fill = bank_fill[bank]
        known = False
        for k in range(fill):
            if bank_words[k, bank] == w:
                known = True
                break
        if not known:
            bank_words[fill, bank] = w
            bank_fill[bank] = fill + 1
            deepest = max(deepest, fill + 1)
    return used, deepest


@njit(cache=True, nogil=True)
def check_shared(
    address,
    lanes,
    nbytes,
    kind,
    padded,
    stride,
    size,
    flags,
    shadow,
    shadow4,
    writer,
    reader,
    cta_clock,
    warp_clock,
    stats,
    offsets,
):  # type: ignore[no-untyped-def]
    """As check_global, for shared memory: `address` is the offset in the CTA, `offsets` that into the whole array."""
    check_races, count = flags
    is_write = kind in (WRITE, WRITE_LATER)
    bank_words = np.empty((32, 32), np.int64)  # [depth, bank]
    bank_fill = np.zeros(32, np.int64)
    group_shift = 5 if nbytes <= 4 else 4 if nbytes == 8 else 3  # lanes served by one wavefront without conflicts
    group, deepest, used, last = -1, 0, 0, -1
    warp = -1
    start, start_end, now, warp_now = 0, -1, 0, 0
    for i in range(lanes.size):
        a, lane = address[i], lanes[i]
        if a < 0 or a + nbytes > size:
            return OUT_OF_BOUNDS, i, a, 0
        if a & (nbytes - 1):
            return MISALIGNED, i, a, 0
        if lane >= start_end:
            cta = lane // padded
            start, start_end, now = cta * stride, (cta + 1) * padded, cta_clock[cta]
        offset = start + a
        is_settled = _is_initialised(shadow4, offset, nbytes)
        if not is_settled:
            bad = _state_error(shadow, offset, nbytes, not is_write)
            if bad:
                return bad - 1, i, a, 0
        offsets[i] = offset
        if check_races and nbytes > 1:
            warp_now = warp_clock[lane >> 5]
            for g in range(offset >> 1, (offset + nbytes) >> 1):
                if _conflicts(writer[g], now, warp_now, lane):
                    return RACE, i, a, writer[g] & _FIELD
                if is_write or kind == ATOMIC:
                    if _conflicts(reader[g], now, warp_now, lane):
                        return RACE, i, a, reader[g] & _FIELD
                    if is_write:
                        writer[g] = make_mark(now, warp_now, lane)
                else:
                    reader[g] = _reader_mark(reader[g], now, warp_now, lane, kind == READ_WARP)
        if is_write and not (is_settled and kind == WRITE):
            for b in range(nbytes):
                shadow[offset + b] = IN_FLIGHT if kind == WRITE_LATER else INITIALISED
        if not count:
            continue
        if lane >> 5 != warp:
            warp = lane >> 5
            stats[REQUESTS] += 1
        if lane >> group_shift != group:
            stats[WAVEFRONTS] += deepest
            stats[IDEAL_WAVEFRONTS] += 1
            group, deepest, used, last = lane >> group_shift, 0, 0, -1
        if a != last:
            used, deepest = _count_banks(bank_words, bank_fill, used, deepest, a, nbytes)
            last = a
    stats[WAVEFRONTS] += deepest
    stats[LANES] += lanes.size
    return OK, 0, 0, 0


@njit(cache=True, nogil=True)
def gather(data, offsets, shift, out):  # type: ignore[no-untyped-def]
    """out[i, k] = data[(offsets[i] >> shift) + k]."""
    for i in range(offsets.size):
        start = offsets[i] >> shift
        for k in range(out.shape[1]):
            out[i, k] = data[start + k]


@njit(cache=True, nogil=True)
def scatter(data, offsets, shift, values):  # type: ignore[no-untyped-def]
    """data[(offsets[i] >> shift) + k] = values[i, k], later lanes last."""
    for i in range(offsets.size):
        start = offsets[i] >> shift
        for k in range(values.shape[1]):
            data[start + k] = values[i, k]


def describe_reader(field: int, padded: int) -> str:
    """Name the other party of a shared-memory race from its mark."""
    if field & _CTA_READERS:
        return "several warps of the CTA"
    if field & _WARP_READERS:
        return f"lanes of warp {(field & (_WARP_READERS - 1)) % max(1, padded // 32)}"
    return f"thread {field % padded}"
