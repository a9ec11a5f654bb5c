"""Agents that talk to the policy as clients of an OpenAI-like API, and what becomes of their calls."""
