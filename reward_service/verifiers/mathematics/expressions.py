r"""Expressions: numbers, names and functions of them, read from tokens by precedence.

    sum      = product (("+" | "-" | "\pm") product)*
    product  = signed (("*" | "/" | nothing) signed)*
    signed   = "-" signed | power
    power    = postfix ("^" exponent)?
    postfix  = atom ("!" | "%" | "°" | "'")*

One pass without backtracking; depth is bounded.
"""

from collections.abc import Sequence
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_OPERATIONS,
    FunctionCall,
    Node,
    Number,
    OverLimits,
    Symbol,
    Unreadable,
)
from reward_service.verifiers.mathematics.tokens import Token, commands

FUNCTIONS = commands("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp abs")
_INVERSES = {r"\sin": r"\arcsin", r"\cos": r"\arccos", r"\tan": r"\arctan"}
# Words of sentences; `at` and `an` may be products.
_NO_PRODUCTS = frozenset(("is", "of", "to", "are", "the", "not", "for", "has", "was", "that", "with", "from"))
_CONSTANTS = frozenset((r"\pi", r"\infty"))
_GREEK = commands(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega "
    "Delta Gamma Lambda Omega Phi Psi Sigma Theta ell "
    "numbersZ numbersN numbersQ numbersC"
)
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ATOMS = FUNCTIONS | _CONSTANTS | _GREEK | _CLOSING.keys() | commands("frac sqrt binom cbrt overline")


def parse_expression(tokens: Sequence[Token]) -> Node:
    """The expression that all the tokens make. Raises Unreadable, OverLimits."""
    parser = _Parser(tokens)
    node = parser.sum()
    if not parser.ended:
        raise Unreadable(f"unexpected {parser.peek()!r}")
    return node


def read_number(text: str) -> Number:
    """A literal such as `12`, `0.5` or `1.5e3`. Raises OverLimits."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4:
        raise OverLimits(f"a number of {len(text)} characters")
    return Number(Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or "0"), decimal="." in mantissa)


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0
        self._operations = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._tokens)

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _take(self) -> Token:
        if self.ended:
            raise Unreadable("the expression ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, text: str) -> bool:
        if self.peek() != text:
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise Unreadable(f"expected {text!r}, got {self.peek()!r}")

    def _operation(self, name: str, *arguments: Node) -> Node:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise OverLimits("an expression of so many operations")
        return FunctionCall(name, arguments)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise OverLimits("nested too deeply")

    def sum(self) -> Node:
        node = self._product()
        while self.peek() in ("+", "-", r"\pm", r"\mp"):
            operator = self._take().text
            node = self._operation(operator, node, self._product())
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            if self._accept("*"):
                node = self._operation("*", node, self._signed())
            elif self._accept("/"):
                node = self._operation("/", node, self._signed())
            elif self._starts_factor():
                node = self._operation("*", node, self._power())
            else:
                return node

    def _starts_factor(self) -> bool:
        if self.ended:
            return False
        token = self._tokens[self._at]
        if token.kind == "number":
            power = self._at > 1 and token.spaced and self._tokens[self._at - 2].text == "^"  # `2^3 5^2`
            return self._tokens[self._at - 1].kind != "number" or power
        if token.text == "|":
            return self._bars == 0
        return token.kind in ("letter", "word") or token.text in _ATOMS

    def _signed(self) -> Node:
        signs: list[str] = []
        while self.peek() in ("-", "+", r"\pm", r"\mp"):
            signs.append(self._take().text)
            if len(signs) > MAX_DEPTH:
                raise OverLimits("too many signs")
        node = self._power()
        for sign in reversed(signs):
            if sign == "-":
                node = FunctionCall("neg", (node,))
            elif sign != "+":
                node = FunctionCall(sign, (Number(Fraction(0)), node))
        return node

    def _power(self) -> Node:
        base = self._postfix()
        return FunctionCall("^", (base, self._exponent())) if self._accept("^") else base

    def _exponent(self) -> Node:
        self._enter()
        node = self._signed()
        self._depth -= 1
        return node

    def _postfix(self) -> Node:
        node = self._atom()
        while self.peek() in ("!", "%", "°"):
            node = self._operation(self._take().text, node)
        return node

    def _atom(self) -> Node:
        self._enter()
        node = self._opened(self._take())
        self._depth -= 1
        return node

    def _opened(self, token: Token) -> Node:
        if token.kind == "number":
            return self._number(token)
        if token.kind == "letter" or token.text in _GREEK:
            return self._name(token.text)
        if token.kind == "word":
            return self._product_of_letters(token)
        if token.text in FUNCTIONS:
            return self._function(token.text)
        if token.text in _CONSTANTS:
            return FunctionCall(token.text)
        if token.text in _CLOSING:
            return self._group(token.text)
        return self._construct(token.text)

    def _construct(self, text: str) -> Node:
        if text in (r"\frac", r"\binom"):
            return FunctionCall("/" if text == r"\frac" else text, (self._argument(), self._argument()))
        if text in (r"\sqrt", r"\cbrt"):
            return self._root(cube=text == r"\cbrt")
        if text == "|":
            self._bars += 1
            inside = self.sum()
            self._bars -= 1
            self._expect("|")
            return FunctionCall(r"\abs", (inside,))
        if text == r"\overline":
            return Symbol(rf"\overline{self._name_in_braces()}")
        raise Unreadable(f"unexpected {text!r}")

    def _group(self, opening: str) -> Node:
        bars, self._bars = self._bars, 0
        inside = self.sum()
        self._bars = bars
        self._expect(_CLOSING[opening])
        return FunctionCall(opening, (inside,)) if opening in (r"\lfloor", r"\lceil") else inside

    def _number(self, token: Token) -> Node:
        number = read_number(token.text)
        if self.peek() == r"\overline":
            return self._repeating(token.text)
        whole = "." not in token.text and not token.roman
        if whole and self.peek() == r"\frac" and self._is_plain_fraction():
            return FunctionCall("+", (number, self._postfix()))
        if whole and self._is_spaced_fraction():
            numerator, _, denominator = self._take(), self._take(), self._take()
            part = FunctionCall("/", (read_number(numerator.text), read_number(denominator.text)))
            return FunctionCall("+", (number, part))
        return number

    def _is_plain_fraction(self) -> bool:
        r"""`\frac{1}{2}` after a whole number: a mixed number."""
        parts = [self.peek(ahead) for ahead in range(1, 7)]
        if parts[0] == "{":
            return [*parts[2:4], parts[5]] == ["}", "{", "}"] and parts[1].isdigit() and parts[4].isdigit()
        return parts[0].isdigit()

    def _is_spaced_fraction(self) -> bool:
        if self._at + 2 >= len(self._tokens):
            return False
        numerator, slash, denominator = self._tokens[self._at : self._at + 3]
        return numerator.text.isdigit() and numerator.spaced and slash.text == "/" and denominator.text.isdigit()

    def _repeating(self, text: str) -> Node:
        r"""`0.1\overline{6}`: a decimal whose last digits repeat for ever."""
        self._take()
        digits = self._take_digits()
        fixed, point, after = text.partition(".")
        if not point:
            raise Unreadable("digits repeat after no decimal point")
        shift = 10 ** len(after)
        repeated = Fraction(int(digits), (10 ** len(digits) - 1) * shift)
        return Number(Fraction(int(fixed + after), shift) + repeated)

    def _take_digits(self) -> str:
        braced = self._accept("{")
        token = self._take()
        if braced:
            self._expect("}")
        if not token.text.isdigit() or len(token.text) > MAX_DEPTH:
            raise Unreadable("digits that repeat are expected")
        return token.text

    def _name(self, name: str) -> Node:
        subscript = "_" + self._name_in_braces() if self._accept("_") else ""
        primes = ""
        while self._accept("'"):
            primes += "'"
        whole = name + subscript + primes
        return FunctionCall(whole) if whole in ("e", "i") else Symbol(whole)

    def _name_in_braces(self) -> str:
        if not self._accept("{"):
            return self._take().text
        parts: list[str] = []
        while not self._accept("}"):
            parts.append(self._take().text)
        return "".join(parts)

    def _product_of_letters(self, token: Token) -> Node:
        """`ab` is a times b; a longer word, or one in roman type, is a name or no mathematics."""
        if token.roman:
            return self._name(token.text)
        if len(token.text) > 4 or token.text in _NO_PRODUCTS:
            raise Unreadable(f"the word {token.text!r}")
        node = self._name(token.text[-1])
        for letter in token.text[-2::-1]:
            node = FunctionCall("*", (FunctionCall(letter) if letter in "ei" else Symbol(letter), node))
        return node

    def _argument(self) -> Node:
        r"""The text in braces, or one token: `\frac12`."""
        if self._accept("{"):
            return self._group("{")
        token = self._tokens[self._at] if not self.ended else None
        if token is not None and token.text.isdigit() and len(token.text) > 1:
            return self._split_digits(token)
        return self._atom()

    def _split_digits(self, token: Token) -> Node:
        r"""`\frac12` has come as one number, and each argument takes a digit."""
        rest = Token("number", token.text[1:], roman=token.roman)
        self._tokens = (*self._tokens[: self._at], rest, *self._tokens[self._at + 1 :])
        return read_number(token.text[0])

    def _root(self, *, cube: bool) -> Node:
        degree: Node = Number(Fraction(3 if cube else 2))
        if self._accept("["):
            degree = self._group("[")
        return FunctionCall("root", (self._postfix_free_argument(), degree))

    def _postfix_free_argument(self) -> Node:
        if self._accept("{"):
            return self._group("{")
        return self._atom()

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self.peek() in ("_", "^"):
            if self._take().text == "_":
                base = self._argument()
            else:
                power = self._exponent()
        if power == FunctionCall("neg", (Number(Fraction(1)),)) and name in _INVERSES:
            name, power = _INVERSES[name], None
        argument = self._function_argument()
        node = FunctionCall(name, (argument,) if base is None else (argument, base))
        return node if power is None else FunctionCall("^", (node, power))

    def _function_argument(self) -> Node:
        if self.peek() in ("(", "{", "["):
            return self._postfix_group()
        node = self._signed()
        while self._starts_factor() and self.peek() not in FUNCTIONS and self.peek() != "(":
            node = self._operation("*", node, self._power())
        return node

    def _postfix_group(self) -> Node:
        return self._group(self._take().text)
