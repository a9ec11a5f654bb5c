#!/bin/sh
# The model of examples/addition, made once: untrained, then warmed up on worked sums.
set -e
test -e models/addition/.complete && exit 0
export TQDM_DISABLE=1 DS_ACCELERATOR=cpu
python examples/addition/make_model.py
# The folder beside sft.toml is the image's, which cannot be written.
learner --config examples/addition/sft.toml --run.directory "$PWD/runs"
touch models/addition/.complete
