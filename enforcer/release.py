"""The version of this process. Read once: an upgrade replaces the metadata under a service that runs."""

from __future__ import annotations

from importlib.metadata import version

RELEASE = version("corral")
