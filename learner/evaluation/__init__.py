"""Held-out evaluation: what is measured, and an evaluation that stands by itself."""
