"""The diagnosis of a run: whom its processes wait for, what bounds it, and the verdict in a sentence."""
