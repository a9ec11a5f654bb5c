"""On PYTHONPATH, it lets the wall clock of a process jump: an offset in seconds is read from CHAOS_CLOCK_FILE.

`time.monotonic` stays: the kernel guarantees that it never jumps.
"""

import datetime
import os
import time
from typing import Any

_FILE = os.environ.get("CHAOS_CLOCK_FILE", "")
_LOOK_EVERY_S = 0.05
_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
_looked_at, _offset_s = -1.0, 0.0


def _offset() -> float:
    global _looked_at, _offset_s
    now = _monotonic()
    if now - _looked_at > _LOOK_EVERY_S:
        _looked_at = now
        try:
            with open(_FILE, encoding="utf-8") as file:
                _offset_s = float(file.read() or 0.0)
        except (OSError, ValueError):
            _offset_s = 0.0
    return _offset_s


def _jumping_time() -> float:
    return _time() + _offset()


def _jumping_time_ns() -> int:
    return _time_ns() + int(_offset() * 1e9)


_Datetime = datetime.datetime


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Datetime)


class _JumpingDatetime(_Datetime, metaclass=_Meta):
    __slots__ = ()  # compiled modules expect instances of the usual size

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _Datetime.now(tz) + datetime.timedelta(seconds=_offset())

    @classmethod
    def utcnow(cls) -> Any:
        return _Datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=_offset())


if _FILE:
    time.time, time.time_ns = _jumping_time, _jumping_time_ns
    datetime.datetime = _JumpingDatetime  # type: ignore[misc]
