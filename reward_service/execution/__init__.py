"""Programs of agents' tools, one by one or in sessions that keep their state, in the sandbox."""
