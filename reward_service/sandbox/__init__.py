"""Runs programs that nobody trusts: `program` says what a run is, `bubblewrap` isolates it, `unsafe` only limits it."""
