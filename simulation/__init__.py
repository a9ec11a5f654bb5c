"""The whole system in one process under a virtual clock: the real code, scripted hardware, faults from one seed."""
