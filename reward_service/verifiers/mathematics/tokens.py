"""The tokens of an answer, and what is asked of lists of them: their parts, and the brackets around them.

Says nothing about meaning.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reward_service.verifiers.mathematics.latex import to_latex

_NUMBER = r"\d+(?:\.(?:\d+|(?=\\(?:overline|bar)(?![a-zA-Z]))))?|\.\d+"
_REST = (
    r"(?P<space>(?:\s|~|\\[,;:!>]|\\ |\\q?quad(?![a-zA-Z])|&nbsp;)+)"
    r"|(?P<roman>\\(?:text(?:bf|it|rm|normal|sf)?|mathrm|mathbf|mathit|mathsf|mathop|mbox|hbox|operatorname\*?|bm|boldsymbol)\s?\{)"
    r"|(?P<row>\\\\)"
    r"|(?P<command>\\[a-zA-Z]+|\\[{}|$%#&_])"
    r"|(?P<word>[^\W\d_]+)"
    r"|(?P<relation><=|>=|!=|==|=<|=>)"
    r"|(?P<symbol>.)"
)
_TOKEN = re.compile(rf"(?P<number>(?:{_NUMBER})(?:[eE][+-]?\d+(?![\w.]))?)|{_REST}", re.DOTALL)
_COMMANDS = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\le": "<=",
    r"\leq": "<=",
    r"\leqslant": "<=",
    r"\ge": ">=",
    r"\geq": ">=",
    r"\geqslant": ">=",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "!=",
    r"\neq": "!=",
    "==": "=",
    "=<": "<=",
    "=>": ">=",
    r"\equiv": "=",
    r"\cdot": "*",
    r"\times": "*",
    r"\ast": "*",
    r"\div": "/",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\mid": "|",
    r"\colon": ":",
    r"\simeq": r"\approx",
    r"\doteq": r"\approx",
    r"\varnothing": r"\emptyset",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lparen": "(",
    r"\rparen": ")",
    r"\bar": r"\overline",
    r"\arctg": r"\arctan",
    r"\tg": r"\tan",
    r"\lg": r"\log",
    r"\%": "%",
    r"\vee": "or",
    r"\lor": "or",
    r"\wedge": "and",
    r"\land": "and",
    r"\dots": r"\ldots",
    r"\cdots": r"\ldots",
    r"\backslash": r"\setminus",
    r"\to": r"\to",
    r"\varphi": r"\phi",
    r"\vartheta": r"\theta",
    r"\varepsilon": r"\epsilon",
}
_CONNECTIVES = frozenset({"or", "and"})
OPENING = frozenset(("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"))
CLOSING = frozenset((")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"))

Kind = Literal["number", "letter", "word", "command", "symbol"]


@dataclass(frozen=True, slots=True)
class Token:
    r"""`spaced`: white space stands before it. `roman`: it stood in `\text{..}` or the like."""

    kind: Kind
    text: str
    spaced: bool = False
    roman: bool = False


def commands(names: str) -> frozenset[str]:
    r"""The commands of those names: `sin cos` gives `\sin` and `\cos`."""
    return frozenset("\\" + name for name in names.split())


_IGNORED = commands(
    "left right middle rm bf it "
    "big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits nolimits "
    "mathstrut strut hfill boxed phantom & _ #"
)

# Plain words that stand for a command.
NAMES = {
    **{name[1:]: name for name in commands("sqrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh")},
    **{name[1:]: name for name in commands("ln log exp pi theta alpha beta gamma lambda")},
    **{"infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "abs": r"\abs", "union": r"\cup", "cbrt": r"\cbrt"},
    **{"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan", "emptyset": r"\emptyset"},
}


def tokenise(text: str) -> tuple[Token, ...]:
    """The tokens of an answer."""
    tokens: list[Token] = []
    spaced = False
    depth = 0
    roman_until: list[int] = []  # the depths of braces at which a \text{..} ends
    for match in _TOKEN.finditer(to_latex(text)):
        kind = match.lastgroup or "symbol"
        part = match.group()
        if kind == "space":
            spaced = True
            continue
        if kind == "roman":
            roman_until.append(depth)
            depth += 1
            continue
        if part == "{":
            depth += 1
        elif part == "}":
            depth -= 1
            if roman_until and roman_until[-1] == depth:
                roman_until.pop()
                spaced = spaced or bool(tokens and tokens[-1].kind == "word")
                continue
        if part in _IGNORED:
            continue
        tokens.append(_token(kind, part, spaced=spaced, roman=bool(roman_until)))
        spaced = False
    return tuple(tokens)


def _token(kind: str, part: str, *, spaced: bool, roman: bool) -> Token:
    if kind == "number":
        return Token("number", part, spaced, roman)
    if kind == "row":
        return Token("symbol", r"\\", spaced, roman)
    if kind in ("command", "relation"):
        name = _COMMANDS.get(part, part)
        return Token(_kind_of(name), name, spaced, roman)
    if kind == "word":
        named = NAMES.get(part) or NAMES.get(part.lower() if len(part) > 2 else part)
        if named is not None:
            return Token("command", named, spaced, roman)
        # A character of Chinese or Japanese is a word, and no variable.
        return Token("letter" if len(part) == 1 and part < "\u3000" else "word", part, spaced, roman)
    return Token("symbol", part, spaced, roman)


def _kind_of(name: str) -> Kind:
    if name in _CONNECTIVES:
        return "word"
    return "command" if name.startswith("\\") and len(name) > 2 else "symbol"


def trimmed(tokens: Sequence[Token]) -> Sequence[Token]:
    """Without the punctuation around it, and without a word such as `and` or `approximately` before it."""
    start, end = 0, len(tokens)
    while end > start and tokens[end - 1].text in (".", ",", ";", ":", "?", r"\ldots"):
        end -= 1
    while start < end and tokens[start].text.lower() in (".", ",", ";", ":", "and", "or", "about", "approximately"):
        start += 1
    return tokens[start:end]


def at_top(tokens: Sequence[Token]) -> list[tuple[int, Token]]:
    """The tokens outside all brackets, with their places."""
    depth = 0
    found: list[tuple[int, Token]] = []
    for at, token in enumerate(tokens):
        if token.text in CLOSING:
            depth -= 1
        if depth == 0 and token.text not in OPENING and token.text not in CLOSING:
            found.append((at, token))
        if token.text in OPENING:
            depth += 1
    return found


def split(tokens: Sequence[Token], separators: frozenset[str]) -> list[Sequence[Token]]:
    """The parts between the separators outside all brackets; of a list with commas, those that are not empty."""
    places = [at for at, token in at_top(tokens) if token.text in separators]
    bounds = [-1, *places, len(tokens)]
    parts = [tokens[start + 1 : end] for start, end in itertools.pairwise(bounds)]
    return [part for part in parts if part] if {"and", ","} & separators else parts


def encloses(tokens: Sequence[Token]) -> bool:
    """True if the first token's bracket closes with the last token."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text in OPENING) - (token.text in CLOSING)
        if depth == 0:
            return at == len(tokens) - 1
    return False
