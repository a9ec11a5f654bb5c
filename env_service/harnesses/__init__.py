"""Harnesses of others as agents: their packages unmodified, in virtual environments of their own."""
