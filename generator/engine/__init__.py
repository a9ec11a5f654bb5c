"""One vLLM engine in this process's charge."""
