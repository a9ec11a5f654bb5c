import pytest

from reward_service.verifiers.ifeval.instruction import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It rains. I stay! Do you? Yes", ["It rains.", "I stay!", "Do you?", "Yes"]),
        ("Really?! No way.", ["Really?!", "No way."]),
        ("Dr. J. Smith met Mrs. Jones, e.g. on May 3.", ["Dr. J. Smith met Mrs. Jones, e.g. on May 3."]),
        ("So do I. Pi is 3.14 or so.", ["So do I.", "Pi is 3.14 or so."]),
        ("Tea, cake, etc. were served. We ate cake, etc. Then we left.", 3),
        ("We met at 5 p.m. It rained.", ["We met at 5 p.m.", "It rained."]),
        ('"Why?" he asked. "Because." She left.', ['"Why?" he asked.', '"Because."', "She left."]),
        ("Wait... what? Wait... Then go.", ["Wait... what?", "Wait...", "Then go."]),
        ("1. Wash it.\n2. Dry it.", ["1. Wash it.", "2. Dry it."]),
        ("There were 12. Then 13.", ["There were 12.", "Then 13."]),
        ("all small letters. and more of them.", ["all small letters.", "and more of them."]),
        ("**It rains.** Stay.", ["**It rains.**", "Stay."]),
        ("A title\n\nIt rains.", ["A title\n\nIt rains."]),
        ("See www.example.com. Then go.", ["See www.example.com.", "Then go."]),
        ("下雨了。我留下。", ["下雨了。", "我留下。"]),
        ("... --- !!!", []),
        ("", []),
    ],
)
def test_a_text_is_split_where_its_sentences_end(text: str, sentences: list[str] | int) -> None:
    found = split_sentences(text)
    assert (len(found) if isinstance(sentences, int) else found) == sentences


@pytest.mark.parametrize("text", ["." * 1_000_000 + "x", ".)" * 500_000, "a. " * 300_000, "。" * 1_000_000])
def test_a_megabyte_of_full_stops_is_read_in_one_pass(text: str) -> None:
    assert len(split_sentences(text)) <= 300_000
