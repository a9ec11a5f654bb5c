"""Advantages, policy losses, corrections and aggregations as pure functions, and the presets made of them.

Importing this package, or its `config` module, loads no torch.
"""
