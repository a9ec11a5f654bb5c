"""Similarity in meaning: cosines of embeddings, of an OpenAI-compatible endpoint or of an encoder of our own.

Only `encoder_worker` loads torch, and only the process of an encoder loads it.
"""
