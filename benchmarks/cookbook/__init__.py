"""Recipes of tinker-cookbook against `headway serve`."""
