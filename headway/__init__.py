"""The umbrella command: all four processes on one machine, evaluation, keys, and the doctor."""
