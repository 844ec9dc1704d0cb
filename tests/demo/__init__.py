"""``make demo``: a real coding agent in a sandbox, and what it could and could not reach."""
