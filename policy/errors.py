"""Every error corral raises on purpose.

::

    CorralError            exit 1   an operation failed or was refused
    ├── PolicyError        exit 2   corral.yaml is invalid, or allows what nobody approved
    ├── ArgumentError      exit 2   what was typed behind corral is invalid
    ├── EngineError        exit 1   Docker cannot do what is needed
    │   └── EngineGoneError         Docker does not answer any more
    ├── EnforcerError      exit 1   the host service is missing, refused, or failed
    ├── NotReadyError      exit 1   a container's network policy could not be made true
    └── InstallError       exit 1   installing or removing parts of corral failed

``message`` says what happened and why, ``hint`` says the fix; both are shown to the user as they are and
never contain a secret.
"""

from __future__ import annotations


class CorralError(Exception):
    """An operation failed or was refused.

    Args:
        message: what happened and why, one or more lines, no prefix.
        hint: the fix, ideally a command; None when the message already says it.
    """

    exit_code = 1
    prefix = "corral: "

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """Return what the user sees on stderr, without a final newline."""
        text = self.prefix + self.message
        return f"{text}\n  fix: {self.hint}" if self.hint else text


class PolicyError(CorralError):
    """corral.yaml is invalid, or allows what nobody approved; nothing has been created."""

    exit_code = 2
    prefix = "corral: policy error: "


class ArgumentError(CorralError):
    """Arguments or options of the command line are invalid; nothing has been created."""

    exit_code = 2
    prefix = "corral: argument error: "


class EngineError(CorralError):
    """Docker is missing, unsupported, or refused a request."""


class EngineGoneError(EngineError):
    """Docker went away in the middle, or does not answer; it may come back."""


class EnforcerError(CorralError):
    """The host service cannot be reached or failed."""


class NotReadyError(EnforcerError):
    """The network policy of one container could not be made true; it must not start."""


class InstallError(CorralError):
    """Installing or removing parts of corral failed."""
