"""Environments that run elsewhere: in child processes, on other machines, and other people's."""
