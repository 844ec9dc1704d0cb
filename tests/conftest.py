"""Fixtures that several folders share."""

import signal

pytest_plugins = ["tests.system.host"]

# Started with & from a script, a process ignores SIGINT, and so does all that it starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
