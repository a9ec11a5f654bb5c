r"""An answer's text in LaTeX and ASCII, from Unicode and plain notation: `x² ≤ ½` becomes `x^{2} \le \frac{1}{2}`."""

import itertools
import re

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
# `\textcolor{red}{7}`, and `\color{red}` before what it colours.
_COLOUR = re.compile(r"\\(?:textcolor|color|colorbox)\s?\{[^{}]*\}(?:\s?\{([^{}]*)\})?")
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


def to_latex(text: str) -> str:
    """The same answer in LaTeX and ASCII, without the marks that set off mathematics or bold text."""
    text = _RAISED.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = _ESCAPED.sub(r"\\", text.translate(_TRANSLATION))
    text = _DEGREES.sub("°", text)
    text = _COLOUR.sub(lambda match: match[1] or "", text)
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
