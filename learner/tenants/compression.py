"""Bodies compressed with zstd, unpacked under a bound of their size."""

import pyarrow

from services.http.refusals import RequestRefused

_CHUNK_BYTES = 1 << 20


def unpacked_zstd(body: bytes, *, max_bytes: int) -> bytes:
    """The body. Raises RequestRefused for one that is larger, or is not zstd; no more than the bound is unpacked."""
    parts, size = [], 0
    try:
        with pyarrow.input_stream(pyarrow.py_buffer(body), compression="zstd") as stream:
            while part := stream.read(_CHUNK_BYTES):
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    message = f"a body of at least {size} bytes when unpacked; at most {max_bytes} are taken"
                    raise RequestRefused(413, "body_too_large", message, expected=max_bytes, got=size)
    except OSError as error:
        raise RequestRefused(422, "invalid_field", f"the body is not zstd, as its header says: {error}") from error
    return b"".join(parts)
