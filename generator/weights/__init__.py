"""The generator's side of weight sync."""
