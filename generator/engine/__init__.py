"""A vLLM engine in this process's charge."""
