"""corral: see docs/architecture.md."""
