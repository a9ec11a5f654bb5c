"""The generator: one vLLM engine, the weights in it, and the routes that sample from them."""
