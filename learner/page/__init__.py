"""The page of a run: its curves live, and its trajectories token by token."""
