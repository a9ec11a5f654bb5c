"""Faults of a data file."""


class DataError(ValueError):
    """A record of a data file does not fit; the text names the file and the line or row."""
