"""The wire between Headway's processes: message types, their encoding, and the HTTP bodies.

Imported by every process; imports nothing of Headway and no torch.
"""
