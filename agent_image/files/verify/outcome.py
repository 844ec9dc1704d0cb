"""How a check ends when it is not simply true."""

from __future__ import annotations


class Failed(Exception):
    """The property is broken; the text says how."""


class Skipped(Exception):
    """There is nothing to look at; the text says why."""
