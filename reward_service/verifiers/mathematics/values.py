"""The value of an expression at given values of its variables: exact where it is rational, else to 100 digits.

Every step is bounded by `limits`, so that no expression takes more than some milliseconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import mpmath

from reward_service.verifiers.mathematics.answers import (
    MAX_ANGLE_BITS,
    MAX_FACTORIAL,
    MAX_FRACTION_BITS,
    MAX_MAGNITUDE_BITS,
    MAX_WHOLE_BITS,
    FunctionCall,
    Node,
    Number,
    OverLimits,
    Symbol,
    UndefinedValue,
    Unreadable,
)

_DIGITS = 100
_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps = _DIGITS
_RELATIVE = _CONTEXT.mpf(10) ** -40
_ABSOLUTE = _CONTEXT.mpf(10) ** -70

_PERIODIC = {
    r"\sin": _CONTEXT.sin,
    r"\cos": _CONTEXT.cos,
    r"\tan": _CONTEXT.tan,
    r"\cot": _CONTEXT.cot,
    r"\sec": _CONTEXT.sec,
    r"\csc": _CONTEXT.csc,
    r"\sinh": _CONTEXT.sinh,
    r"\cosh": _CONTEXT.cosh,
    r"\tanh": _CONTEXT.tanh,
}
_SMOOTH = {r"\arcsin": _CONTEXT.asin, r"\arccos": _CONTEXT.acos, r"\arctan": _CONTEXT.atan}


@dataclass(frozen=True, slots=True)
class Value:
    """`exact` when it is rational as computed; `number`, of mpmath, in any case."""

    number: object
    exact: Fraction | None = None

    @property
    def is_real(self) -> bool:
        return self.exact is not None or bool(abs(_CONTEXT.im(self.number)) <= _ABSOLUTE)

    @property
    def is_infinite(self) -> bool:
        return self.exact is None and bool(_CONTEXT.isinf(self.number))

    @property
    def is_finite_decimal(self) -> bool:
        """True if the value is known to have a decimal that ends."""
        if self.exact is None:
            return False
        rest = self.exact.denominator
        for factor in (2, 5):
            while rest % factor == 0:
                rest //= factor
        return rest == 1

    def __float__(self) -> float:
        return float(_CONTEXT.re(self.number))


def rational(value: Fraction | int) -> Value:
    """An exact value."""
    exact = Fraction(value)
    return Value(_CONTEXT.mpf(exact.numerator) / exact.denominator, exact)


def same(one: Value, other: Value) -> bool:
    """True if the values are equal: exactly, or in 40 digits where either is not rational."""
    if one.exact is not None and other.exact is not None:
        return one.exact == other.exact
    if one.is_infinite or other.is_infinite:
        return bool(one.number == other.number)
    gap = abs(_CONTEXT.mpc(one.number) - _CONTEXT.mpc(other.number))
    return bool(gap <= _ABSOLUTE or gap <= _RELATIVE * abs(_CONTEXT.mpc(other.number)))


def near(one: Value, other: Value, *, relative: float) -> bool:
    """True if the values differ by at most that share of the second."""
    if one.is_infinite or other.is_infinite:
        return bool(one.number == other.number)
    if one.exact is not None and other.exact is not None:
        return abs(one.exact - other.exact) <= Fraction(relative) * abs(other.exact)
    gap = abs(_CONTEXT.mpc(one.number) - _CONTEXT.mpc(other.number))
    return bool(gap <= relative * abs(_CONTEXT.mpc(other.number)))


def less(one: Value, other: Value) -> bool:
    """True if the first of two real values is smaller. Raises Unreadable if either is not real."""
    if not (one.is_real and other.is_real):
        raise Unreadable("complex numbers have no order")
    if one.exact is not None and other.exact is not None:
        return one.exact < other.exact
    return bool(_CONTEXT.re(one.number) < _CONTEXT.re(other.number)) and not same(one, other)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    r"""Settings that an expression is evaluated under. `log_base`: of a bare `\log`; None is e."""

    variables: Mapping[str, Fraction]
    log_base: int | None = 10


def evaluate(node: Node, setting: EvaluationSettings) -> Value:
    """The value of the expression. Raises OverLimits, Undefined, Unreadable."""
    if isinstance(node, Number):
        return rational(node.value)
    if isinstance(node, Symbol):
        if node.name not in setting.variables:
            raise Unreadable(f"no value for {node.name}")
        return rational(setting.variables[node.name])
    arguments = tuple(evaluate(argument, setting) for argument in node.arguments)
    try:
        return _checked(_apply(node, arguments, setting))
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise UndefinedValue(f"{node.name}: {error}") from error


def _checked(value: Value) -> Value:
    if value.exact is None and _CONTEXT.isnan(value.number):
        raise UndefinedValue("not a number")
    if value.exact is not None and value.exact.denominator.bit_length() > MAX_FRACTION_BITS:
        return Value(value.number)
    if value.exact is not None and value.exact.numerator.bit_length() > MAX_WHOLE_BITS:
        raise OverLimits("a number of so many digits")
    return value


def _apply(node: FunctionCall, arguments: Sequence[Value], setting: EvaluationSettings) -> Value:
    name = node.name
    if name in ("+", "-", "*", "/", "neg"):
        return arithmetic(name, arguments)
    if name == "^":
        return _power(*arguments)
    if name == "root":
        return _root(*arguments)
    if name == "mod":
        return _residue(*arguments)
    if name in ("!", r"\binom"):
        return _combinatorial(arguments)
    if name in ("%", "°"):
        return _postfix(name, arguments[0])
    return _function(name, arguments, setting)


def arithmetic(name: str, arguments: Sequence[Value]) -> Value:
    """The sum, difference, product or quotient (`+`, `-`, `*`, `/`) of two values, or the negative (`neg`) of one.

    Raises ZeroDivisionError.
    """
    exacts = [argument.exact for argument in arguments]
    if all(exact is not None for exact in exacts):
        return rational(_combine_exact(name, [exact for exact in exacts if exact is not None]))
    numbers = [_CONTEXT.convert(argument.number) for argument in arguments]
    if name == "neg":
        return Value(-numbers[0])
    one, other = numbers
    if name == "/" and other == 0:
        raise ZeroDivisionError("division by zero")
    return Value(
        one + other if name == "+" else one - other if name == "-" else one * other if name == "*" else one / other
    )


def _combine_exact(name: str, arguments: Sequence[Fraction]) -> Fraction:
    if name == "neg":
        return -arguments[0]
    one, other = arguments
    if name == "+":
        return one + other
    if name == "-":
        return one - other
    return one * other if name == "*" else one / other


def _power(base: Value, exponent: Value) -> Value:
    if exponent.exact is not None and exponent.exact.denominator == 1 and base.exact is not None:
        if _power_fits(base.exact, abs(exponent.exact.numerator)):
            return rational(base.exact ** int(exponent.exact))
    elif exponent.exact is not None and base.exact is not None and exponent.exact.denominator <= 12:
        root = _exact_root(base.exact, exponent.exact.denominator)
        if root is not None:
            return _power(rational(root), rational(exponent.exact.numerator))
    if exponent.exact is not None and exponent.exact.denominator % 2 and base.is_real and _is_negative(base):
        # The real root, as in a cube root, and not the principal one.
        size = _power(arithmetic("neg", (base,)), exponent)
        return size if exponent.exact.numerator % 2 == 0 else arithmetic("neg", (size,))
    number, power = _CONTEXT.convert(base.number), _CONTEXT.convert(exponent.number)
    if number == 0:
        if _CONTEXT.re(power) <= 0:
            raise ZeroDivisionError("zero to a power that is not positive")
        return rational(0)
    if _CONTEXT.isinf(number) or _CONTEXT.isinf(power):
        raise UndefinedValue("a power of infinity")
    if abs(power) * (abs(_CONTEXT.log(abs(number), 2)) + 4) > MAX_MAGNITUDE_BITS:
        raise OverLimits("a power of so many digits")
    return Value(_CONTEXT.power(number, power))


def _power_fits(base: Fraction, exponent: int) -> bool:
    """True if the power is computed exactly. Raises OverLimits for a power of a whole number that is too large."""
    if base.denominator == 1 and (base.numerator.bit_length() - 1) * exponent > MAX_WHOLE_BITS:
        raise OverLimits("a power of so many digits")
    return max(base.numerator.bit_length(), base.denominator.bit_length()) * exponent <= MAX_FRACTION_BITS or (
        base.denominator == 1
    )


def _root(radicand: Value, degree: Value) -> Value:
    if degree.exact is None or degree.exact == 0:
        raise Unreadable("a root whose degree is no number")
    if radicand.exact is not None and degree.exact.denominator == 1 and 0 < degree.exact <= 100:
        root = _exact_root(radicand.exact, int(degree.exact))
        if root is not None:
            return rational(root)
    return _power(radicand, rational(1 / degree.exact))


def _is_negative(value: Value) -> bool:
    return value.exact < 0 if value.exact is not None else bool(_CONTEXT.re(value.number) < 0)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The real root where it is rational: of a negative number only for an odd degree."""
    if value < 0:
        root = None if degree % 2 == 0 else _exact_root(-value, degree)
        return None if root is None else -root
    above, below = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return None if above is None or below is None else Fraction(above, below)


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 1:
        return value
    if degree == 2:
        found = math.isqrt(value)
    else:
        # 100 digits are enough for a guess at any number that is that short; a longer one stays inexact.
        found = int(_CONTEXT.nint(_CONTEXT.root(value, degree))) if value.bit_length() < 300 else 0
    return found if found**degree == value else None


def _residue(value: Value, modulus: Value) -> Value:
    if value.exact is None or modulus.exact is None:
        raise Unreadable("a residue of what is no fraction")
    if modulus.exact == 0:
        raise ZeroDivisionError("a residue to the modulus zero")
    return rational(value.exact % modulus.exact)


def _combinatorial(arguments: Sequence[Value]) -> Value:
    wholes = [
        int(argument.exact) for argument in arguments if argument.exact is not None and argument.exact.denominator == 1
    ]
    if len(wholes) != len(arguments):
        raise Unreadable("a factorial of what is no whole number")
    if max(map(abs, wholes)) > MAX_FACTORIAL:
        raise OverLimits("a factorial of a large number")
    if len(wholes) == 1:
        return rational(math.factorial(wholes[0]))
    return rational(math.comb(*wholes))


def _postfix(name: str, argument: Value) -> Value:
    if name == "%":
        return arithmetic("/", (argument, rational(100)))
    return arithmetic("*", (argument, Value(_CONTEXT.pi / 180)))


def _function(name: str, arguments: Sequence[Value], setting: EvaluationSettings) -> Value:
    constants = {r"\pi": _CONTEXT.pi, "e": _CONTEXT.e, "i": _CONTEXT.mpc(0, 1), r"\infty": _CONTEXT.inf}
    if name in constants:
        return Value(+constants[name])
    number = _CONTEXT.convert(arguments[0].number)
    if name in (r"\ln", r"\log"):
        return _logarithm(name, arguments, setting)
    if name == r"\exp":
        return _power(Value(+_CONTEXT.e), arguments[0])
    if name == r"\abs":
        exact = arguments[0].exact
        return rational(abs(exact)) if exact is not None else Value(abs(number))
    if name in (r"\lfloor", r"\lceil"):
        return _rounded(name, arguments[0])
    if name in _PERIODIC:
        if abs(number) > _CONTEXT.mpf(2) ** MAX_ANGLE_BITS:
            raise OverLimits("a periodic function of a large number")
        return Value(_PERIODIC[name](number))
    if name in _SMOOTH:
        return Value(_SMOOTH[name](number))
    raise Unreadable(f"the function {name}")


def _rounded(name: str, argument: Value) -> Value:
    if not argument.is_real or argument.is_infinite:
        raise Unreadable("rounding of what is not real")
    if argument.exact is not None:
        return rational(math.floor(argument.exact) if name == r"\lfloor" else math.ceil(argument.exact))
    number = _CONTEXT.re(argument.number)
    if abs(number) > _CONTEXT.mpf(2) ** MAX_ANGLE_BITS:
        raise OverLimits("rounding of a large number")
    return rational(int(_CONTEXT.floor(number) if name == r"\lfloor" else _CONTEXT.ceil(number)))


def _logarithm(name: str, arguments: Sequence[Value], setting: EvaluationSettings) -> Value:
    number = _CONTEXT.convert(arguments[0].number)
    if number == 0:
        raise UndefinedValue("the logarithm of zero")
    natural = _CONTEXT.log(number)
    if len(arguments) > 1:
        return Value(natural / _CONTEXT.log(_CONTEXT.convert(arguments[1].number)))
    if name == r"\ln" or setting.log_base is None:
        return Value(natural)
    return Value(natural / _CONTEXT.log(setting.log_base))
