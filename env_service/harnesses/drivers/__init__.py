"""Programs that begin harnesses, each run by its virtual environment's own Python."""
