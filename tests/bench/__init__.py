"""Benchmarks: how long things take, as numbers and as ratios to something of the same machine. Nothing is asserted."""
