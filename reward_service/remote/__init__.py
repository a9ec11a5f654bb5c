"""Verifiers elsewhere: those of another Headway reward service, and services of OpenRLHF's `/get_reward` shape."""
