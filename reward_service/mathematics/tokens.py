"""An answer's text as tokens."""

import re
from dataclasses import dataclass
from typing import Literal

from reward_service.mathematics.notation import to_latex

Kind = Literal["number", "letter", "word", "command", "symbol"]


@dataclass(frozen=True, slots=True)
class Token:
    r"""`spaced`: white space stands before it. `roman`: it stood in `\text{..}` or the like."""

    kind: Kind
    text: str
    spaced: bool = False
    roman: bool = False


_NUMBER = r"\d+(?:\.(?:\d+|(?=\\(?:overline|bar)(?![a-zA-Z]))))?|\.\d+"
_THOUSANDS = r"(?<!\d)[1-9]\d{0,2}(?:,\d{3})+(?![\d])(?:\.\d+)?"
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
_TOKEN_THOUSANDS = re.compile(rf"(?P<number>(?:{_THOUSANDS}|{_NUMBER})(?:[eE][+-]?\d+(?![\w.]))?)|{_REST}", re.DOTALL)

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


def commands(names: str) -> frozenset[str]:
    r"""The commands of those names: `sin cos` gives `\sin` and `\cos`."""
    return frozenset("\\" + name for name in names.split())


_IGNORED = commands(
    "left right middle rm bf it "
    "big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits nolimits "
    "mathstrut strut hfill boxed phantom & _ #"
)
_CONNECTIVES = frozenset({"or", "and"})

# Plain words that stand for a command.
NAMES = {
    **{name[1:]: name for name in commands("sqrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh")},
    **{name[1:]: name for name in commands("ln log exp pi theta alpha beta gamma lambda")},
    **{"infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "abs": r"\abs", "union": r"\cup", "cbrt": r"\cbrt"},
    **{"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan", "emptyset": r"\emptyset"},
}


def tokenise(text: str, *, thousands: bool) -> tuple[Token, ...]:
    """The tokens of an answer. `thousands`: `1,234` is one number, and not two."""
    pattern = _TOKEN_THOUSANDS if thousands else _TOKEN
    tokens: list[Token] = []
    spaced = False
    depth = 0
    roman_until: list[int] = []  # the depths of braces at which a \text{..} ends
    for match in pattern.finditer(to_latex(text)):
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
        return Token("number", part.replace(",", ""), spaced, roman)
    if kind == "row":
        return Token("symbol", r"\\", spaced, roman)
    if kind in ("command", "relation"):
        name = _COMMANDS.get(part, part)
        return Token(_kind_of(name), name, spaced, roman)
    if kind == "word":
        named = NAMES.get(part) or NAMES.get(part.lower() if len(part) > 2 else part)
        if named is not None:
            return Token("command", named, spaced, roman)
        return Token("letter" if len(part) == 1 else "word", part, spaced, roman)
    return Token("symbol", part, spaced, roman)


def _kind_of(name: str) -> Kind:
    if name in _CONNECTIVES:
        return "word"
    return "command" if name.startswith("\\") and len(name) > 2 else "symbol"
