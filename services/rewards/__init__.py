"""The client of reward services: `services.rewards.client.RewardClient`, and for scripts `services.rewards.sync`."""
