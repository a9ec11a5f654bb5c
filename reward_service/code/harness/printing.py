"""A standard output that keeps what is printed until it is asked for."""

import io

_MOST = 1 << 16


class Printed(io.TextIOBase):
    """Keeps the first 65536 characters."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def writable(self) -> bool:
        """It is there to be written to."""
        return True

    def write(self, text: str, /) -> int:
        """Keep as much of it as there is room for."""
        kept = text[: _MOST - self._size]
        if kept:
            self._parts.append(kept)
            self._size += len(kept)
        return len(text)

    def taken(self) -> str:
        """All that was printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        return text
