r"""An answer's text as tokens, after Unicode and plain notation have become LaTeX: `x² ≤ ½` is `x^{2} \le \frac{1}{2}`.

Says nothing about meaning. The last part is about lists of tokens with brackets in them.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_CHARACTERS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "﹣": "-",
    "－": "-",
    "＋": "+",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∗": "*",
    "÷": r"\div ",
    "∕": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "π": r"\pi ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≃": r"\approx ",
    "∈": r"\in ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "ℝ": r"\reals ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∨": r" or ",
    "∧": r" and ",
    "º": "°",
    "˚": "°",
    "′": "'",
    "’": "'",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "（": "(",
    "）": ")",
    "［": "[",
    "］": "]",
    "，": ", ",
    "：": ":",
    "；": ";",
    "％": "%",
    "＝": "=",
    "。": ".",
    "又": " ",
    "…": "...",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}",
    "⅛": r"\frac{1}{8}",
    "⅜": r"\frac{3}{8}",
    "⅝": r"\frac{5}{8}",
    "⅞": r"\frac{7}{8}",
    "\u00a0": " ",
    "\u2009": r"\,",
    "\u202f": r"\,",
    "\u200b": "",
    "\ufeff": "",
}
_TRANSLATION = str.maketrans(_CHARACTERS)

_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|\\textdegree(?![a-zA-Z])")
_REALS = re.compile(r"\\(?:mathbb|Bbb)\s?(?:\{\s?R\s?\}|R(?![a-zA-Z]))")
_NUMBERS = re.compile(r"\\(?:mathbb|Bbb)\s?(?:\{\s?)?([ZNQC])(?:\s?\})?(?![a-zA-Z])")
_PYTHON_POWER = re.compile(r"(?<=[\w)\]}])\*\*(?=[\w({\\-])")
_DELIMITERS = re.compile(r"\\[()]|\\\[|\\\](?!\s*\\end)|`|\*\*|(?<!_)__(?!_)")
# Backslashes that were escaped once more, as in JSON.
_ESCAPED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|text|left|right|le|leq|ge|geq|infty|pi|cdot|times|pm|cup)(?![a-zA-Z]))"
)
_TIMES = re.compile(r"(?<=\d)\s+x\s+(?=\d)")
# `{}_{10}C_3`, `^{10}C_{3}`, `C_{10}^{3}` and `{10 \choose 3}` are the same number.
_CHOOSE = re.compile(
    r"(?<![\w}])(?:\{\s*\})?[_^]\{?(?P<above>\w+)\}?\s*C_\{?(?P<below>\w+)\}?"
    r"|(?<![\w}\\])C_\{?(?P<from>\d+)\}?\^\{?(?P<so_many>\d+)\}?"
    r"|\{(?P<n>[^{}\\]+)\\choose\s?(?P<k>[^{}\\]+)\}"
)
_DOTTED = re.compile(r"(?<=[\d.])\\dot\s?(\{\d\}|\d)")
_GOES_ON = re.compile(r"(?<![\d.])(\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,6}?)\3+)\s?(?:\.\.\.|\\l?dots(?![a-zA-Z]))")
_NOON = re.compile(r"(?<![A-Za-z])([APap])\.\s?[Mm]\.?(?![A-Za-z])")
_MODULUS = re.compile(r"(?:\\pmod\s?\{?|\\bmod\s?\{?|\(?\s?\\?(?:mod|text\{mod\s?\})\s?)\s?(\d{1,40})(?!\d)\s?[)}]?")
_DIGITS = re.compile(r"\d+")
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")
_AS_DIGITS = str.maketrans("abcdefghij", "0123456789")
# What parts thousands and nothing else: `1\,200`, `1{,}200`, `32,\! 349`, `10 000`.
_SURE_GAP = r"(?:,?\\!\s?|\\[,;: ]\s?|\{,\}|~)"
_SURE_THOUSANDS = re.compile(rf"(?<![\d.,])(?:[1-9]\d{{0,2}}(?:{_SURE_GAP}\d{{3}})+|\d{{1,3}}(?: \d{{3}})+(?!/))(?!\d)")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
# What may also part the members of a list; all of it or nothing: `1,234,56` is a list.
_THOUSANDS = r"(?<![\d.,_^])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)"
_LIST_MARK = re.compile(
    rf"(?P<thousands>{_THOUSANDS})|(?P<opening>\\\{{|^\{{|[(\[])|(?P<closing>\\\}}|\}}$|[)\]])|[,;]"
)
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


def to_latex(text: str) -> str:
    """The same answer in LaTeX and ASCII, without the marks that set off mathematics or bold text."""
    text = _RAISED.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = _ESCAPED.sub(r"\\", text.translate(_TRANSLATION))
    text = _DEGREES.sub("°", text)
    text = _REALS.sub(r"\\reals ", text)
    text = _NUMBERS.sub(r"\\numbers\1 ", text)
    text = _without_dollars(text)
    text = _SURE_THOUSANDS.sub(lambda match: "".join(_DIGITS.findall(match.group())), text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _without_thousands_commas(text.strip())
    # Said of a number as a unit is; digits as letters, since a unit has none.
    text = _MODULUS.sub(lambda match: r"\text{ mod" + match.group(1).translate(_AS_LETTERS) + "}", text)
    text = _PYTHON_POWER.sub("^", text)
    text = _CHOOSE.sub(_binomial, text)
    text = _TIMES.sub(" * ", text)
    text = _DOTTED.sub(r"\\overline\1", text)
    text = _GOES_ON.sub(lambda match: rf"{match[1]}\overline{{{match[2] or match[3]}}}", text)
    text = _NOON.sub(r"\1m", text)
    return _DELIMITERS.sub(" ", text).strip()


def _binomial(match: re.Match[str]) -> str:
    above, below = (part.strip() for part in match.groups() if part is not None)
    return rf"\binom{{{above}}}{{{below}}}"


def modulus_of(word: str) -> int | None:
    """The number in what stands for `mod 7` after `to_latex`."""
    letters = word.removeprefix("mod")
    if letters == word or not letters or not set(letters) <= set("abcdefghij"):
        return None
    return int(letters.translate(_AS_DIGITS))


def _without_dollars(text: str) -> str:
    r"""A `$` that sets off mathematics goes; one of money, `\$` or a lone one before a digit, becomes `\$`."""
    bare = text.replace(r"\$", "")
    if bare.count("$") % 2 and re.search(r"\$\s?\d", bare):
        return re.sub(r"(?<!\\)\$", r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text)


def _without_thousands_commas(text: str) -> str:
    """`1,234` as 1234. In brackets only beside another comma: `(1,200)` is a pair, `(1,200, 3)` holds a number."""
    within: list[list[tuple[int, int]]] = [[]]  # for each open bracket, where numbers with separators stand
    listed = [True]  # whether it holds another comma
    joined: list[tuple[int, int]] = []
    for mark in _LIST_MARK.finditer(text):
        if mark.lastgroup == "thousands":
            within[-1].append(mark.span())
        elif mark.lastgroup == "opening":
            within.append([])
            listed.append(False)
        elif mark.lastgroup == "closing" and len(within) > 1:
            numbers = within.pop()
            joined.extend(numbers if listed.pop() else ())
        elif mark.lastgroup is None:
            listed[-1] = True
    joined.extend(span for numbers in within for span in numbers)
    places = sorted(joined)
    bounds = [0, *(end for span in places for end in span), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(bounds)]
    return "".join(part.replace(",", "") if at % 2 else part for at, part in enumerate(parts))


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
