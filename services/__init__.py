"""The process shell that the four processes share: config, logs, lifecycle, HTTP, ZeroMQ, metrics. Loads no torch."""
