"""Actors of a simulated world: the processes of the system, their engines, trainers, environments and rewards."""
