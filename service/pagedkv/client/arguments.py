"""Arguments of calls, checked before anything is sent: what the wire cannot hold is an InvalidArgument here.

Each check returns the value as messages take it, and names field, limit and value where it refuses.
"""

from __future__ import annotations

import ctypes
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from pagedkv.errors import InvalidArgument

T = TypeVar("T")

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1
_NO_SEQUENCES = (str, bytes, bytearray, Mapping, set, frozenset)
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


def refuse(field: str, message: str, value: object, limit: object) -> NoReturn:
    """Raise InvalidArgument."""
    shown = _show(value)
    raise InvalidArgument(f"{message}, got {shown}", field=field, value=shown, limit=limit)


def optional(check: Callable[..., T], field: str, value: Any, *limits: Any) -> T | None:
    """Return None for None, else what the check returns."""
    return None if value is None else check(field, value, *limits)


def flag(field: str, value: Any) -> bool:
    """Return a bool; numbers are none."""
    plain = _plain(value)
    if not isinstance(plain, bool):
        refuse(field, "must be True or False", value, "True or False")
    return plain


def integer(field: str, value: Any, low: int, high: int) -> int:
    """Return an integer in [low, high], be it Python's, NumPy's or PyTorch's; a bool or 1.0 is none."""
    expected = f"an integer in [{low}, {high}]"
    plain = _plain(value)
    if isinstance(plain, bool) or not hasattr(type(plain), "__index__"):
        refuse(field, f"must be {expected}", value, expected)
    try:
        number = operator.index(plain)
    except TypeError:
        refuse(field, f"must be {expected}", value, expected)
    if not low <= number <= high:
        refuse(field, f"must be {expected}", value, low if number < low else high)
    return number


def integers(field: str, values: Any, low: int, high: int) -> list[int]:
    """Return integers in [low, high] from any iterable or array of one dimension."""
    found = items(field, values, "integers")
    if set(map(type, found)) <= {int} and (not found or (low <= min(found) and max(found) <= high)):
        return found  # the common case at the speed of C
    return [integer(f"{field}[{at}]", value, low, high) for at, value in enumerate(found)]


def number(field: str, value: Any, expected: str, is_fit: Callable[[float], bool]) -> float:
    """Return a real number that is fit, as `expected` says in words."""
    plain = _plain(value)
    is_real = hasattr(type(plain), "__float__") or hasattr(type(plain), "__index__")
    try:
        real = float(plain) if is_real and not isinstance(plain, bool) else None
    except (TypeError, ValueError, OverflowError):
        real = None
    if real is None:
        refuse(field, f"must be a number, {expected}", value, expected)
    if not is_fit(real):
        refuse(field, f"must be {expected}", value, expected)
    return real


def float32(field: str, value: Any) -> float:
    """Return a number that is finite as a float32."""
    return number(field, value, "finite as a float32", lambda real: math.isfinite(round_to_float32(real)))


def positive_float32(field: str, value: Any) -> float:
    """Return a number that is finite and above 0 as a float32."""
    return number(field, value, "finite and above 0 as a float32", lambda real: 0 < round_to_float32(real) < math.inf)


def float32s(field: str, values: Any) -> list[float]:
    """Return numbers that are finite as float32, from any iterable or array of one dimension."""
    return [float32(f"{field}[{at}]", value) for at, value in enumerate(items(field, values, "numbers"))]


def seconds(field: str, value: Any) -> float:
    """Return a time limit; one below 0 has passed already."""
    return number(field, value, "finite, in seconds, below 2^31", lambda real: -(2**31) < real < 2**31)


def text(field: str, value: Any) -> str:
    """Return a string that UTF-8 can hold."""
    if not isinstance(value, str):
        refuse(field, "must be a string", value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, "must hold no lone surrogates, which UTF-8 cannot express", value, "UTF-8")
    return value


def texts(field: str, values: Any) -> list[str]:
    """Return strings from any iterable; one string alone is one of them."""
    if isinstance(values, str):
        return [text(field, values)]
    return [text(f"{field}[{at}]", value) for at, value in enumerate(items(field, values, "strings"))]


def octets(field: str, value: Any) -> bytes:
    """Return bytes."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        refuse(field, "must be bytes", value, "bytes")
    return bytes(value)


def items(field: str, values: Any, kind: str) -> list[Any]:
    """Return the elements of an iterable or array; text, mappings and sets, which have no order, are none."""
    expected = f"a sequence of {kind}"
    if isinstance(values, _NO_SEQUENCES) or not isinstance(values, Iterable):
        refuse(field, f"must be {expected}", values, expected)
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    if not isinstance(found, list):  # an array of no dimension
        refuse(field, f"must be {expected}", values, expected)
    return found


def round_to_float32(real: float) -> float:
    """Return the nearest float32, infinite beyond the largest."""
    return ctypes.c_float(real).value


def _plain(value: Any) -> Any:
    """Return the Python value of a scalar of NumPy's or PyTorch's; an array of some dimension is no number."""
    if getattr(value, "ndim", 0):
        return None
    return value.item() if hasattr(value, "item") else value


def _show(value: object) -> str:
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return f"a {type(value).__name__} too long to show"
