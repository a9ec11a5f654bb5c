"""Reads answers as mathematics and compares them, without a computer algebra system and within fixed limits."""
