"""Verifiers that ask another service over HTTP: what judges, embeddings and remote reward services have in common.

lane -> cache -> endpoint: budget, place, turn, breaker -> HTTP -> answer, or an error with its kind
"""
