"""Releases: versions for users, promoted by a gate, kept with their hashes, and a way back to each of them."""
