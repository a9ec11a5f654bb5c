import os
from pathlib import Path

from learner.page.child_of_page import environment_of_child, replay_words, yield_to_page


def test_a_child_is_neither_a_rank_nor_a_resumed_learner() -> None:
    mine = {"PATH": "/bin", "PYTHONPATH": "here", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "1"}
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
    own = {"HEADWAY_PARENT": "1", "HEADWAY_RANK_RESTARTS": "2", "_HEADWAY_STARTED_BY": "..."}

    assert environment_of_child({**mine, **torchrun, **own}) == {**mine, "HEADWAY_PAGE": str(os.getpid())}


def test_a_change_is_one_word_whatever_it_holds() -> None:
    words = replay_words(Path("run"), ["a=--to", "b=x y"], to=Path("out"), groups=False, version=0)

    assert words[4:] == ["replay", "run", "--to", "out", "--set=a=--to", "--set=b=x y", "--groups=0", "--from=0"]


def test_a_process_that_no_page_has_started_keeps_its_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield_to_page()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
