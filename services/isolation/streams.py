"""The ends of pipes on the service's side, on the event loop and bounded."""

import asyncio
import os
import time

DROPPED_BYTES_S = 8 << 20
"""Bytes a second that are read of output that nobody keeps."""

_PART = 1 << 16


class DroppedPace:
    """Slows down whoever reads what is dropped: a program that prints without end would keep the event loop busy."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def pause_s(self, size: int) -> float:
        """Seconds until more may be read, of a reader who has just dropped so many bytes."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / DROPPED_BYTES_S
        return self._free_at - now


class PipeWriter:
    """Writes to a pipe. What its reader does not take is dropped when it is closed."""

    def __init__(self, handle: int) -> None:
        os.set_blocking(handle, False)
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._finishing = False
        self.is_open = True

    def send(self, data: bytes) -> None:
        """Write what the pipe takes now, and the rest as it takes it."""
        if not self.is_open or not data:
            return
        self._waiting += data
        if self._flushed.is_set():
            self._flushed.clear()
            self._write()
            if self._waiting and self.is_open:
                self._loop.add_writer(self._handle, self._write)

    async def flushed(self) -> None:
        """Return when the pipe has taken everything, or nobody will."""
        await self._flushed.wait()

    def finish(self) -> None:
        """Close it when everything is written."""
        self._finishing = True
        if self._flushed.is_set():
            self.close()

    def close(self) -> None:
        """Close it now."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_writer(self._handle)
            os.close(self._handle)
            self._flushed.set()

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._handle, self._waiting[:_PART])]
        except BlockingIOError:
            return
        except OSError:  # its reader is gone
            self._waiting.clear()
            self.close()
            return
        self._loop.remove_writer(self._handle)
        self._flushed.set()
        if self._finishing:
            self.close()


class PipeReader:
    """Reads from a pipe and keeps up to `most` bytes, the first ones, or with `last` the last ones.

    More is left in the pipe, so that its writer waits, until `drain`: then it is read and dropped, at a bounded pace.
    """

    def __init__(self, handle: int, *, most: int, drain: bool, last: bool = False) -> None:
        os.set_blocking(handle, False)
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._drain = drain
        self._last = last
        self._kept = bytearray()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_reading = True
        self._is_open = True
        self._pace = DroppedPace()
        self._pause: asyncio.TimerHandle | None = None
        self.cut = False
        self._loop.add_reader(handle, self._read)

    async def readline(self) -> bytes:
        """The next line; a part of it if it is too long to be kept; what there is of it at the end."""
        while b"\n" not in self._kept and len(self._kept) < self._most and self._is_open:
            self._changed.clear()
            await self._changed.wait()
        end = self._kept.find(b"\n") + 1 or len(self._kept)
        line = bytes(self._kept[:end])
        del self._kept[:end]
        self._go_on()
        return line

    def drain(self) -> None:
        """From here on, drop what is too much."""
        self._drain = True
        self._go_on()

    async def ended(self) -> bytes:
        """Text that was kept and not taken, when the pipe has ended."""
        await self._ended.wait()
        return bytes(self._kept)

    def close(self) -> None:
        """Close it now."""
        if self._is_open:
            self._is_open = False
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._changed.set()
            self._ended.set()

    def _read(self) -> None:
        room = self._most - len(self._kept)
        if room <= 0 and not self._drain:
            self._hold()
            return
        try:
            part = os.read(self._handle, _PART if self._drain else min(room, _PART))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.close()
            return
        if self._last:
            self._kept += part
            del self._kept[: -self._most]
        else:
            self._kept += part[:room] if room > 0 else b""
        if len(part) > room:
            self.cut = True
            self._hold()
            self._pause = self._loop.call_later(self._pace.pause_s(len(part) - room), self._go_on)
        self._changed.set()

    def _hold(self) -> None:
        self._is_reading = False
        self._loop.remove_reader(self._handle)

    def _go_on(self) -> None:
        if self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._handle, self._read)
