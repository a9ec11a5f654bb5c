"""Serves the Tinker API: other people's training loops, many at once, on one base model.

A tenant is the owner of a key. It opens sessions, in them training models (adapters on the base model) and sampling
sessions. An operation is a request that has its turn, `seq_id`, in the sequence of a training model.

    request ─▶ journal, synced ─▶ its model's queue ─▶ a turn of the trainer's thread ─▶ a future ─▶ retrieved
"""
