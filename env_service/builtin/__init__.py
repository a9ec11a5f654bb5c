"""Environments of several turns that come with Headway: games, tools, and adapters to the games of others."""
