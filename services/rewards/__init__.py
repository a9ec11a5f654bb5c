"""The client of reward services: `services.rewards.client.RewardClient`, and for scripts `score_sync` beside it."""
