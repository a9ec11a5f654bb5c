"""Scenarios of a run, and whether the system keeps its promises."""
