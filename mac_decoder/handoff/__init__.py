"""The decoder's side of the wire: one producer, its connections, and what a handoff brought."""
