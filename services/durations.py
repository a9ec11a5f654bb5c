"""Durations, as people read them."""


def clock_text(seconds: float) -> str:
    """`2h05m`, `3m07s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
