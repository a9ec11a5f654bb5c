"""The rollout of a lease: what the environment says, what the policy samples, what the whole is worth."""
