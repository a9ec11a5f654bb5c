"""Extraction of the answer from a completion. Every function takes time linear in the text, whatever it holds."""

import itertools
import re
from collections import deque
from collections.abc import Iterator

from services.thinking import without_thought

_BOX_OR_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)

_TOGETHER = re.compile(
    r"[^\w.=:\n]{0,8}(?:(?!(?:but|then|not|no|so|actually|wait|rather|instead|hence|thus|therefore|correct\w*)\b)"
    r"\w{1,12}[^\w.=:\n]{1,8}){0,3}",
    re.IGNORECASE,
)

# What says that a box holds the value of the box before it, rounded.
_ROUNDED = re.compile(r"\\approx|\\simeq|≈|approximately|numerically")

# "The answer is", "Final answer:", "Answers are"; what is said between the words is short.
_STATEMENT = re.compile(
    r"\b(?:answers?|solutions?|(?:choice|option)\b(?!\s+\(?[A-J]\b))\b(?:(?!\b(?:since|because|where|when|if)\b)[^.\n:=：]){0,60}?"
    r"(?:\b(?:is|are|be)\b|[:=：])"
    r"|\bans\b\.?[^.\n:=：]{0,10}?[:=：]"
    r"|(?:答案|正解|正答|答え|回答|解答)[^。，、\n:=：是为は】]{0,20}(?:(?<!不)[:=：是为は】]\s?)+"
    r"|(?:정답|답안|답변|(?<!\w)답)\s?(?:은|는|[:：])"
    r"|\b(?:réponse|respuesta|resposta|antwort|risposta)\b[^.\n:=]{0,60}?(?:\b(?:est|es|é|ist|è)\b|[:=])"
    r"|\b(?:ответ|відповідь)\b[^.\n:=]{0,60}?(?:[:=]|\s[—–-]\s)"
    # Of other languages of common tests: Indonesian, Vietnamese, Turkish, Polish, Czech, Dutch, Scandinavian, Finnish,
    # Romanian, Hungarian, Swahili, Yoruba, Greek, Hebrew, Arabic, Persian, Hindi, Bengali and Thai.
    r"|(?<!\w)(?:jawaban|đáp án|câu trả lời|cevap|yanıt|odpowiedź|odpověď|antwoord|svar|svaret|vastaus|răspuns"
    r"|răspunsul|válasz|jibu|ìdáhùn|απάντηση|תשובה|الإجابة|إجابة|الجواب|جواب|پاسخ|उत्तर|উত্তর|คำตอบ)(?!\w)[^.\n:=：।]{0,60}?"
    r"(?:[:=：]|\b(?:adalah|ialah|là|to|jest|je|is|är|er|on|este|ni|είναι|היא|הוא|هي|هو)\b|คือ)",
    re.IGNORECASE,
)
# Not the point of `St. Louis` or `U.S. Grant`.
_ABBREVIATED = "".join(rf"(?<!\b{word})" for word in ("St", "Mt", "Dr", "Mr", "Ms", "Mrs", "Jr")) + r"(?<!\.[A-Z])"
_SENTENCE_END = re.compile(rf"(?:{_ABBREVIATED}\.|[!?])(?=\s|\*|$)(?!\s*[=+/<>-])|[。！？\n]")
# What follows a statement that is taken back: `The answer is 12? No, it is 13.`
_WITHDRAWN = re.compile(
    r"[.?!][\s*_)\"'$]*(?:wait[,.]? )?(?:no|nope|wrong|incorrect|correction)\s?[,.;:!–—]", re.IGNORECASE
)
TAIL_CHARS = 20_000
_MAX_STATEMENTS = 20
_MAX_STATEMENT_CHARS = 1000
_OPENING_MARKS = " \t\r\n*_:>"


def strip_thinking(completion: str) -> str:
    """The text after the last `</think>`, without space around it; of a thought that never ends, nothing."""
    return without_thought(completion).strip()


def last_tagged(text: str) -> str | None:
    """The stripped content of the last `<answer>..</answer>`."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.strip() if closed and opened else None


def boxed(text: str) -> tuple[str, ...]:
    r"""The stripped contents of all `\boxed{..}` that close and are not empty, in the order in which they open."""
    return tuple(content for _, _, content in _boxes(text))


def boxed_together(text: str) -> tuple[str, ...]:
    r"""The contents of the last box, and of those that hardly anything parts from it: `\boxed{1} and \boxed{2}`.

    Each once. They are one answer in parts; after a longer text the last box is a correction of those before. What only
    says the same in decimals, as in `\boxed{\sqrt{2}} \approx \boxed{1.414}`, is left out.
    """
    run: list[tuple[int, int, str]] = []
    for start, end, content in reversed(_boxes(text)):
        if run and (end > run[-1][0] or not _TOGETHER.fullmatch(text[end : run[-1][0]])):
            break
        run.append((start, end, content))
    run.reverse()
    exact = run[:1] + [box for before, box in itertools.pairwise(run) if not _repeats(text, before[1], box)]
    return tuple(dict.fromkeys(content for _, _, content in exact))


def _repeats(text: str, end: int, box: tuple[int, int, str]) -> bool:
    """True if the box holds, rounded, what the box that ends there holds."""
    return _ROUNDED.search(text[end : box[0]]) is not None or _ROUNDED.match(box[2]) is not None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each box.

    One pass: a completion of boxes that never close must not take quadratic time.
    """
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int | None, int]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}" and opened:
            start, inside = opened.pop()
            if start is not None:
                found.append((start, match.end(), text[inside : match.start()].strip()))
        elif token.endswith("{") and token != r"\{":
            opened.append((match.start() if token != "{" else None, match.end()))
    return sorted(box for box in found if box[2])


def last_boxed(text: str) -> str | None:
    r"""The stripped content of the last `\boxed{..}`."""
    found = boxed(text)
    return found[-1] if found else None


def last_stated(text: str) -> str | None:
    """The answer of the last statement; see `statements`."""
    return next((said for _, said in statements(text)), None)


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Text of each "the answer is .." or "answer: .." says, to the end of its sentence or line, and where; the last
    first.

    At most `_MAX_STATEMENTS` of them, in the last `TAIL_CHARS` characters. One of what the answer is not says nothing,
    and one that is taken back at once ends the search: what follows it is the answer.
    """
    start = max(0, len(text) - TAIL_CHARS)
    for match in reversed(deque(_STATEMENT.finditer(text, start), maxlen=_MAX_STATEMENTS)):
        rest = text[match.end() : match.end() + _MAX_STATEMENT_CHARS].lstrip(_OPENING_MARKS)
        sentence = _said(rest)
        if _WITHDRAWN.match(rest, len(sentence)):
            return
        said = sentence.strip().strip("*_").strip()
        if said and not said.lower().startswith("not "):
            yield match.end(), said


def _said(rest: str) -> str:
    if rest.startswith(("$$", r"\[")):
        return rest[2:].partition("$$" if rest.startswith("$$") else r"\]")[0]
    end = _SENTENCE_END.search(rest)
    return rest if end is None else rest[: end.start()]


def last_line(text: str) -> str | None:
    """The last line that is not empty, stripped."""
    line = text.rstrip().rpartition("\n")[2].strip()
    return line or None
