"""Similarity in meaning: cosines of embeddings, of an OpenAI-compatible endpoint or of an encoder of our own."""
