r"""Unicode and plain notation as LaTeX: `x² ≤ ½` is `x^{2} \le \frac{1}{2}`. Says nothing about meaning."""

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
_DELIMITERS = re.compile(r"\\[()]|\\\[|\\\](?!\s*\\end)|`|\*\*|(?<!_)__(?!_)")
_NOON = re.compile(r"(?<![A-Za-z])([APap])\.\s?[Mm]\.?(?![A-Za-z])")
_MODULUS = re.compile(r"(?:\\pmod\s?\{?|\\bmod\s?\{?|\(?\s?\\?(?:mod|text\{mod\s?\})\s?)\s?(\d+)\s?[)}]?")
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")
_DIGIT_GAP = re.compile(r"(?<=\d)(?:\\[,!;: ]|,\\!|\{,\}|~)(?=\d{3})")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d/])")


def to_latex(text: str) -> str:
    """The same answer in LaTeX and ASCII, without the marks that set off mathematics or bold text."""
    text = _RAISED.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = text.translate(_TRANSLATION)
    text = _DEGREES.sub("°", text)
    text = _REALS.sub(r"\\reals ", text)
    text = _NUMBERS.sub(r"\\numbers\1 ", text)
    text = _without_dollars(text)
    text = _DIGIT_GAP.sub(",", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match.group(1) + match.group(2).replace(" ", ","), text)
    # Said of a number as a unit is; digits as letters, since a unit has none.
    text = _MODULUS.sub(lambda match: r"\text{ mod" + match.group(1).translate(_AS_LETTERS) + "}", text)
    text = _NOON.sub(r"\1m", text)
    return _DELIMITERS.sub(" ", text).strip()


def _without_dollars(text: str) -> str:
    r"""A `$` that sets off mathematics goes; one of money, `\$` or a lone one before a digit, becomes `\$`."""
    bare = text.replace(r"\$", "")
    if bare.count("$") % 2 and re.search(r"\$\s?\d", bare):
        return re.sub(r"(?<!\\)\$", r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text)
