"""How much work one answer may ask for. Beyond it an answer is not computed at all."""

MAX_CHARS = 4000
MAX_TOKENS = 1500
MAX_DEPTH = 60
MAX_DIGITS = 1000  # of a number as written
MAX_BITS = 1 << 15  # of an exact number in the computation
MAX_MAGNITUDE_BITS = 1 << 20  # of a power; 9^9^9 is above it
MAX_FACTORIAL = 5000
MAX_ANGLE_BITS = 512  # of the argument of a periodic function
MAX_ITEMS = 64  # of a list, a set, a matrix
MAX_SIGNS = 8  # parts of an answer with a plus-minus sign


class OverLimits(Exception):
    """The answer asks for more work than any answer of ours needs."""


class Unreadable(Exception):
    """This is not the notation that we read; another reader may know it."""


class Undefined(Exception):
    """The expression has no value there: a division by zero, a logarithm of zero."""
