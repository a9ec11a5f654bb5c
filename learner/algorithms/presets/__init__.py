"""The algorithms, one file each: settings, and the preset that they make."""
