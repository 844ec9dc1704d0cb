"""A deterministic model server that speaks what the harnesses speak; see ``server``."""
