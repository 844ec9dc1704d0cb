"""Fixtures that several folders share."""

pytest_plugins = ["tests.system.host"]
