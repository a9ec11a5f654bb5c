from reward_service.verifiers.extraction import boxed, last_boxed, last_tagged, strip_thinking


def test_thoughts_are_not_answers() -> None:
    assert strip_thinking("<think>4</think> 5 ") == "5"
    assert strip_thinking("4</think>5") == "5"
    assert strip_thinking("5 <think> 4") == "5"
    assert strip_thinking("<think> 4") == ""


def test_boxes_are_read_with_their_braces() -> None:
    assert boxed(r"\boxed{\frac{1}{2}} then \boxed{ \{1\} } and \boxed{} and \boxed{3") == (r"\frac{1}{2}", r"\{1\}")
    assert last_tagged("<answer>1</answer><answer> 2 </answer><answer>3") == "2"
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed(r"\boxed{never closed, \fbox{6}") == "6"
    assert last_boxed("no box } at all") is None


def test_boxes_that_never_close_are_read_in_one_pass() -> None:
    assert boxed(r"\boxed{" * 200_000) == ()
