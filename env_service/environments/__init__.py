"""Tasks and the environments that roll them out."""
