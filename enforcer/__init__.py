"""The host service: Docker's events and DNS answers in, kernel elements and hosts files out."""
