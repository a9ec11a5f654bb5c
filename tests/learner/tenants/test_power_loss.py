from pathlib import Path

import numpy as np
import pytest

from learner.tenants import tensor_files
from learner.tenants.tensor_files import folder_facts, remove_drafts, write_tensor_folder
from protocol.tinker.messages import MESSAGES
from services.append_file import sync_folder
from tests.learner.journal.power_loss import UnsyncedDisk
from tests.learner.tenants.service_client import served


async def test_all_that_clients_were_told_is_true_after_a_power_loss_in_the_first_life(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as beneath:
        disk = UnsyncedDisk.beneath(beneath)
        async with served(tmp_path / "run" / "tinker", snapshot_every=3) as parts:
            client = parts.client()
            model_id = await client.model()
            for seq_id in (1, 3):
                await client.loss(model_id, seq_id)
                await client.result(await client.step(model_id, seq_id + 1))
            saved = await client.post("save_weights", model_id=model_id, seq_id=5, path="one")
            path = (await client.result(saved))["path"]
            target = await client.post(
                "save_weights_for_sampler", model_id=model_id, seq_id=6, sampling_session_seq_id=0, kind="inflight"
            )
            session = (await client.result(target))["sampling_session_id"]
            early = await client.train(model_id, 8)
            left = disk.left_of(tmp_path, tmp_path_factory.mktemp("after") / "left")
            expected = [await client.loss(model_id, 7), (await client.result(early))["loss:sum"]]
    disk.close()
    async with served(left / "run" / "tinker") as parts:
        again = parts.client()
        assert [await again.loss(model_id, 7), (await again.result(early))["loss:sum"]] == expected
        assert (await again.post("weights_info", tinker_path=path))["lora_rank"] == 2
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"sampling_session_id": session, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        sampled = await again.post("asample", **body)
        answer = await again.http.post("/retrieve_future", json={"request_id": sampled["request_id"]})
        assert len(MESSAGES["SampleResponse"].FromString(answer.content).sequences) == 1


def test_a_folder_that_a_former_life_renamed_and_did_not_sync_outlives_a_power_loss(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: Path) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "models" / "one"
    folder.parent.mkdir()
    tensors = {"state": {"weight": np.zeros(2, dtype=np.float32)}}
    disk = UnsyncedDisk.beneath(monkeypatch)
    sync_folder(tmp_path)
    write_tensor_folder(folder, tensors=tensors, facts=1)
    with monkeypatch.context() as dying:
        dying.setattr(tensor_files, "sync_folder", dies)
        with pytest.raises(KeyboardInterrupt):
            write_tensor_folder(folder, tensors=tensors, facts=2)
    remove_drafts(folder.parent)  # the next life, which takes away the former folder
    left = disk.left_of(tmp_path, tmp_path_factory.mktemp("after") / "left")
    disk.close()
    assert folder_facts(left / "models" / "one") == folder_facts(folder) == 2
