"""The presets, by family: each is an estimator of advantages, a loss, and the knobs of its config."""
