"""Reward models: sequence-classification models that score completions, each in a process of its own.

    item -> lane: waits for others, at most `batch_size` -> worker process: tokenize, pad, one forward pass -> rewards

Only `worker` loads torch, and only the worker process loads it.
"""
