"""The entry point: exit codes, and errors as one message with the fix.

===  ==================================================================
0    done
1    the operation failed or was refused; a check of verify failed
2    the policy or the arguments are invalid; nothing was created
130  interrupted (128 + the signal's number)
===  ==================================================================

``run`` and ``shell`` end with the exit code of what they ran.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, TextIO

# Objects. Looking for garbage among what imports make takes a tenth of a command's time and finds none.
BEFORE_GARBAGE = 100_000


def program() -> NoReturn:
    """Be the program ``corral``: what is left at its end the system takes back, which is faster."""
    gc.set_threshold(BEFORE_GARBAGE)
    code = main()
    # All that has to be undone was undone where it was done; main flushed.
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run corral with these arguments (default: the process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        # Not worth importing anything for.
        from corral import __version__

        return _flushed(0, f"corral {__version__}\n")
    for stream in (sys.stdout, sys.stderr):
        # A path may hold what the terminal's encoding cannot.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _end_on_signals()
        return _flushed(_guarded(arguments))
    except KeyboardInterrupt:
        # While something was still being imported.
        return 128 + signal.SIGINT


def _flushed(code: int, text: str = "") -> int:
    """Write what is left, while a failure can still be told: at exit Python would make it code 120."""
    lost = _lost(sys.stdout, text)
    if lost is not None and code == 0:
        if not isinstance(lost, BrokenPipeError):
            from corral.oserrors import unwritten

            _say(unwritten("stdout", lost).render())
        code = 1
    _lost(sys.stderr)
    return code


def _lost(stream: TextIO | None, text: str = "") -> OSError | None:
    """Write and flush; return why a stream cannot be written, after which nothing more is tried."""
    if stream is None:
        return None
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    except ValueError:
        return None
    return None


def _parsed(arguments: list[str]) -> int:
    from corral.parser import parse
    from corral.sessioncommands import app

    return parse(app, arguments)


def _verbose() -> bool:
    # Where it was not needed there was no option either.
    invoking = sys.modules.get("corral.invoking")
    return bool(invoking.verbose() if invoking is not None else os.environ.get("CORRAL_DEBUG"))


def _trace() -> str:
    import traceback

    return traceback.format_exc().rstrip()


def _guarded(arguments: list[str]) -> int:
    from corral import quick
    from corral.oserrors import DISK, translate, unwritten
    from policy.errors import CorralError

    try:
        known = quick.command(arguments)
        code = known() or 0 if known is not None else _parsed(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except CorralError as error:
        _say(error.render())
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        # Files are named where they are written (oserrors.naming); what has no name is our own output.
        nameless = error.filename is None and error.errno in DISK
        _say((unwritten("stdout", error) if nameless else translate(error)).render())
        if _verbose():
            _say(_trace())
        return 1
    except Exception as error:
        _say(f"corral: internal error: {type(error).__name__}: {error}")
        _say(_trace() if _verbose() else "  fix: corral -v shows where; please report it")
        return 1
    return code


def _say(text: str) -> None:
    from corral.plain import terminal_safe

    with contextlib.suppress(OSError):
        sys.stderr.write(terminal_safe(text) + "\n")
        sys.stderr.flush()


def _end_on_signals() -> None:
    """A request to end unwinds like an interrupt, so that nothing half made is left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup's wish stands.
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    program()
