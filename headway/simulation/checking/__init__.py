"""What happens in a run, and whether the system keeps its promises."""
