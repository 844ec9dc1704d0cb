"""What ``corral install`` puts on the host."""
