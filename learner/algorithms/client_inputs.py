"""Names by which a client's training loop asks for the losses of Headway's own algorithms. Loads no torch."""

PRESET_SETTING = "headway"
"""A setting of a loss, which names the algorithm."""
LAGS = "lags"
"""An input: optimizer steps between the weights that sampled a token and those that it trains."""
VERSIONS = "versions"
"""An input: steps of the weights that sampled each token. Lags are made of them when the operation's turn comes."""
