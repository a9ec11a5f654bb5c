"""Models of our own that judge completions: reward models and encoders, each in a process of its own.

    item -> waits for others -> worker process: tokenize, pad, one forward pass -> rewards, or embeddings

Only `worker` and what it loads import torch, and only the worker process imports them.
"""
