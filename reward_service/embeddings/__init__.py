"""Similarity in meaning: cosines of embeddings that an OpenAI-compatible endpoint makes."""
