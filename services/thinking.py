"""The part of a completion that a reasoning model has thought, and the part that it says."""


def without_thought(completion: str) -> str:
    """The text after the last `</think>`; of a thought that never ends, nothing. Spaces around it stay.

    The opening tag is often part of the prompt, so the closing one alone is enough.
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def said_alone(completion: str) -> str:
    """The same without the space that parts a thought from it; a text without a thought stays as it is."""
    said = without_thought(completion)
    return completion if said == completion else said.lstrip()
