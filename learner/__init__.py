"""The learner: consumes trajectory groups, trains with DeepSpeed, publishes weights."""
