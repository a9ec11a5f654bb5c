"""Lanes: how the items of one verifier are judged. Each verifier has its own, so a slow one holds up no other.

    inline      cheap sync code that cannot hang, in the service, at once
    event_loop  async code, a bounded number of items at a time
    workers     sync code that can hang, in processes that are killed at a deadline

Other parts of the service bring lanes of their own: reward models, judges, code.
"""
