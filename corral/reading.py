"""What it means that the host service is away, for who only reads: another thing than for a start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from policy.errors import EnforcerError


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Let who reads know what a missing service means for what runs.

    Raises:
        EnforcerError: what was raised within, in these words when the service is not there.
    """
    try:
        yield
    except EnforcerError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise
        raise EnforcerError(
            "the enforcer is not running, and only it can tell this; what runs stays fenced as it was, "
            "and nothing new starts",
            error.hint,
        ) from error
