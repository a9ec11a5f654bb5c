"""The language of a text, by langdetect, the same at each call.

Loaded only in worker processes: its profiles take seconds and much memory.
"""

from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException

# What langdetect reads of a text at most, from its start.
_WINDOW_CHARS = 10_000


def detect_language(text: str) -> str | None:
    """langdetect's code for the language; None if the text has no features of one, or two at its start and end."""
    windows = {text[:_WINDOW_CHARS], text[-_WINDOW_CHARS:]}
    found = {_detect(window) for window in windows}
    return found.pop() if len(found) == 1 else None


def _detect(text: str) -> str | None:
    detector = _FACTORY.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


def _load() -> DetectorFactory:
    """With a seed: langdetect samples the features of a text, and would otherwise judge one text in two ways."""
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


# Loaded with the module, as a part of the worker's start: at the first item it would count against that one's deadline.
_FACTORY = _load()
