import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.journal.records import record
from learner.tenants.provenance import SequenceRecords
from protocol.tinker.sampling import SampledTokens, SampleRequest
from protocol.tinker.tensors import TinkerWireError
from protocol.tinker.training import ProvenanceSpan, WireDatum

PROMPT, TOKENS, LOGPROBS = (1, 2, 3), (4, 5), (-0.5, -0.25)


def remembered(folder: Path, hours: float = 0.0) -> SequenceRecords:
    records = SequenceRecords(folder, clock=lambda: 3600.0 * (1000 + hours))
    sampled = SampledTokens(TOKENS, LOGPROBS, (0, 0), stopped=True)
    records.remember("a", ["s:1:0"], SampleRequest(prompt=PROMPT), [sampled])
    return records


def datum() -> WireDatum:
    """The sequence, each target the token after its place."""
    row = np.array([*PROMPT, *TOKENS])
    spans = (ProvenanceSpan("s:1:0", 0, 3, sampled=False), ProvenanceSpan("s:1:0", 0, 1, sampled=True))
    targets = (ProvenanceSpan("s:1:0", 1, 2, sampled=False), ProvenanceSpan("s:1:0", 0, 2, sampled=True))
    logprobs = np.array([0, 0, *LOGPROBS], np.float32)
    return WireDatum(row[:-1], {"target_tokens": row[1:], "logprobs": logprobs}, spans, targets)


def test_what_was_sampled_passes(tmp_path: Path) -> None:
    remembered(tmp_path).check("a", 0, datum(), all_known=True)


def test_it_still_does_after_a_start_with_a_record_cut_in_two(tmp_path: Path) -> None:
    remembered(tmp_path)
    path = tmp_path / "sequences-00001000.log"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:-3])
    SequenceRecords(tmp_path).check("a", 0, datum(), all_known=True)


def test_a_file_that_a_loss_of_power_left_damaged_is_no_reason_not_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for its sync: pages may have reached the disk in any order."""
    records = remembered(tmp_path)
    sampled = [SampledTokens(TOKENS, LOGPROBS, (0, 0), stopped=True)]
    path = tmp_path / "sequences-00001000.log"
    whole = path.stat().st_size
    for number in (2, 3):
        records.remember("a", [f"s:{number}:0"], SampleRequest(prompt=PROMPT), sampled)
    content = path.read_bytes()
    path.write_bytes(content[:whole] + bytes(whole) + content[2 * whole :])
    again = SequenceRecords(tmp_path, clock=lambda: 3600.0 * 1000)
    again.check("a", 0, datum(), all_known=True)
    assert "sequences from there on are not known any more" in caplog.text
    again.remember("a", ["s:4:0"], SampleRequest(prompt=PROMPT), sampled)
    assert set(SequenceRecords(tmp_path)._records) == {"s:1:0", "s:4:0"}


def test_a_datum_without_spans_is_not_looked_at(tmp_path: Path) -> None:
    SequenceRecords(tmp_path).check("a", 0, replace(datum(), input_spans=(), target_spans=()), all_known=True)


def spoiled(**inputs: object) -> WireDatum:
    return replace(datum(), inputs={**datum().inputs, **inputs})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("claimed", "complaint"),
    [
        (replace(datum(), token_ids=np.array([1, 2, 9, 4])), r"data\[3\].*input_spans\[0\]: position 2 holds token 9"),
        (spoiled(target_tokens=np.array([2, 3, 4, 6])), r"loss_fn_input_spans\[1\]: position 3 holds token 6"),
        (spoiled(logprobs=np.array([0, 0, -0.5, -0.3])), r"position 3 has the logprob -0\.3000; it was .* -0\.2500"),
        (spoiled(logprobs=np.array([0, 0, -0.5, np.nan])), "position 3 has the logprob nan"),
        (spoiled(logprobs=np.zeros((4, 2))), r"logprobs of the shape \[4, 2\]; expected \[4\]"),
        (replace(datum(), target_spans=()), "spans of one part alone"),
        (replace(datum(), target_spans=datum().target_spans[:1]), "spans of 2 tokens; expected to tile 4"),
        (
            replace(datum(), input_spans=(ProvenanceSpan("s:1:0", 0, 4, sampled=False),)),
            "4 tokens from its offset on; the sequence has 3",
        ),
        (replace(datum(), input_spans=(ProvenanceSpan("s:2:0", 0, 4, sampled=False),)), "no sequence s:2:0"),
    ],
)
def test_a_claim_of_what_was_not_sampled_is_refused(tmp_path: Path, claimed: WireDatum, complaint: str) -> None:
    with pytest.raises(TinkerWireError, match=complaint):
        remembered(tmp_path).check("a", 3, claimed, all_known=True)


def test_a_sequence_of_another_tenant_is_none(tmp_path: Path) -> None:
    with pytest.raises(TinkerWireError, match="no sequence"):
        remembered(tmp_path).check("b", 0, datum(), all_known=True)


def test_sequences_go_after_a_day(tmp_path: Path) -> None:
    remembered(tmp_path)
    records = SequenceRecords(tmp_path, clock=lambda: 3600.0 * 1020)
    records.remember("a", [], SampleRequest(prompt=PROMPT), [])
    records.check("a", 0, datum(), all_known=True)
    records = SequenceRecords(tmp_path, clock=lambda: 3600.0 * 1030)
    records._hour -= 1
    records.remember("a", [], SampleRequest(prompt=PROMPT), [])
    with pytest.raises(TinkerWireError, match="no sequence"):
        records.check("a", 0, datum(), all_known=True)
    assert not (tmp_path / "sequences-00001000.log").exists()


def test_a_file_that_cannot_be_opened_for_the_next_hour_leaves_the_former_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 3600.0 * 1000
    records = SequenceRecords(tmp_path, clock=lambda: now)
    now += 3600

    def refusing(_: Path) -> None:
        raise OSError(28, "No space left on device")

    sampled = SampledTokens(TOKENS, LOGPROBS, (0, 0), stopped=True)
    with monkeypatch.context() as broken:
        broken.setattr("learner.tenants.provenance.AppendFile", refusing)
        records.remember("a", ["s:1:0"], SampleRequest(prompt=PROMPT), [sampled])
    records.remember("a", ["s:1:1"], SampleRequest(prompt=PROMPT), [sampled])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sequences-00001000.log", "sequences-00001001.log"]
    SequenceRecords(tmp_path).check("a", 0, datum(), all_known=True)


def test_targets_at_the_places_of_a_prompt_may_be_anything(tmp_path: Path) -> None:
    """The cookbook's loops fill them with zeros."""
    remembered(tmp_path).check("a", 0, spoiled(target_tokens=np.array([0, 0, *TOKENS])), all_known=True)


def test_a_sequence_that_was_sampled_without_a_record_is_checked_while_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cookbook names the sequences in its datums, whether they were recorded or not."""
    monkeypatch.setattr("learner.tenants.provenance._RECENT_TOKENS", 12)
    records, sampled = SequenceRecords(tmp_path), SampledTokens(TOKENS, LOGPROBS, (0, 0), stopped=True)
    records.remember("a", ["s:1:0", "s:1:1"], SampleRequest(prompt=PROMPT), [sampled] * 2, recorded=False)
    records.check("a", 0, datum(), all_known=True)
    with pytest.raises(TinkerWireError, match="position 3 holds token 6"):
        records.check("a", 0, spoiled(target_tokens=np.array([2, 3, 4, 6])), all_known=False)
    records.remember("a", ["s:2:0"], SampleRequest(prompt=PROMPT), [sampled], recorded=False)
    records.check("a", 0, spoiled(target_tokens=np.array([2, 3, 4, 6])), all_known=False)
    with pytest.raises(TinkerWireError, match="no sequence s:1:0"):
        records.check("a", 0, datum(), all_known=True)
    assert (tmp_path / next(tmp_path.iterdir()).name).stat().st_size == 0, "nothing of it is on the disk"


def test_another_tenant_s_sequence_tells_nothing(tmp_path: Path) -> None:
    remembered(tmp_path).check("b", 0, spoiled(target_tokens=np.array([2, 3, 4, 6])), all_known=False)


def stamped(folder: Path, model_id: str = "s:train:0") -> SequenceRecords:
    records = SequenceRecords(folder)
    sampled = SampledTokens(TOKENS, LOGPROBS, (4, 5), stopped=True)
    records.remember("a", ["s:1:0"], SampleRequest(prompt=PROMPT), [sampled], model_id=model_id)
    return records


def test_versions_of_what_was_sampled_are_known_by_its_spans_after_a_start_too(tmp_path: Path) -> None:
    for records in (stamped(tmp_path), SequenceRecords(tmp_path)):
        found = records.versions("a", "s:train:0", datum())
        assert found is not None
        assert found.tolist() == [0, 0, 4, 5]


def test_versions_are_of_the_model_that_is_trained_or_of_the_base_model(tmp_path: Path) -> None:
    assert stamped(tmp_path / "other", "s:train:1").versions("a", "s:train:0", datum()) is None
    assert stamped(tmp_path / "base", "").versions("a", "s:train:0", datum()) is not None
    assert stamped(tmp_path / "mine").versions("b", "s:train:0", datum()) is None


@pytest.mark.parametrize("lengths", [(1 << 60, 1), (-1, 5), (1, 1), ()])
def test_spans_that_do_not_tile_have_no_versions(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    spans = tuple(ProvenanceSpan("s:1:0", 0, each, sampled=False) for each in lengths)
    assert stamped(tmp_path).versions("a", "s:train:0", replace(datum(), target_spans=spans)) is None


def test_a_record_of_a_former_release_has_no_versions_and_is_checked(tmp_path: Path) -> None:
    head = json.dumps(["s:1:0", "a", 3, 2]).encode() + b"\n"
    ids = np.array([*PROMPT, *TOKENS], "<i8").tobytes()
    line = b"".join(record(1, [head, ids, np.array(LOGPROBS, "<f4").tobytes()]))
    hour = int(time.time()) // 3600
    (tmp_path / f"sequences-{hour:08d}.log").write_bytes(line)
    records = SequenceRecords(tmp_path)
    assert records.versions("a", "s:train:0", datum()) is None
    records.check("a", 0, datum(), all_known=True)
    with pytest.raises(TinkerWireError, match="position 3 holds token 6"):
        records.check("a", 0, spoiled(target_tokens=np.array([2, 3, 4, 6])), all_known=True)
