"""Typed ZeroMQ sockets, their keys, and what goes on below the messages."""
