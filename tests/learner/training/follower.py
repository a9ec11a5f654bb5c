"""A rank other than 0 for the tests: `follower.py MODEL CONFIG...`, each config a training config as JSON.

It follows one trainer after another, over one process group.
"""

import sys
from pathlib import Path

import torch

from learner.algorithms.config import GrpoConfig
from learner.training.config import TrainingConfig
from learner.training.ranks import close_process_group, die_with_parent, open_process_group, ranks_from_environment
from learner.training.trainer import Trainer


def main() -> None:
    import os

    die_with_parent()
    torch.set_num_threads(1)
    ranks = ranks_from_environment(os.environ)
    assert ranks is not None
    commands = open_process_group(ranks, timeout_s=60)
    for text in sys.argv[2:]:
        config = TrainingConfig.model_validate_json(text)
        Trainer(Path(sys.argv[1]), algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands).follow()
    close_process_group()


if __name__ == "__main__":
    main()
