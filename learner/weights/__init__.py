"""Weight sync: the fleet of generators, and how new weights reach it."""
