"""Configuration of a process: its models, where settings come from, and what processes must agree about."""
