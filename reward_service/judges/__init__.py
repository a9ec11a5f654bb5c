"""Judges: language models behind an OpenAI-compatible endpoint that say how good a completion is.

item -> material: texts in their delimiters -> asking: votes, both orders -> endpoint -> verdict, or asked again
"""
