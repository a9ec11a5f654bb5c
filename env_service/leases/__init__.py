"""The leases that an env_service holds: which run, and what became of those that ended."""
