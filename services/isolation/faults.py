"""Refusals of walls."""


class CannotIsolate(ValueError):
    """Walls cannot be built here; the text says what is missing, and what to do about it."""
