"""Checkpoints of conversations: what an env_service that was started again needs to go on with them."""
