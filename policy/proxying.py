"""What the CLI, the enforcer and the proxy of a sandbox agree on. Pure.

The proxy is a container of the sandbox like any other, ``SERVICE``, without a name it may reach. Sessions
reach it as ``ALIAS:PORT``: that is the gateway of their bridge, where a relay of the user's systemd listens,
because ports of one bridge never see each other. For each name it is asked for, the proxy asks the enforcer,
through a socket in a directory that is mounted read-only at ``DIAL_TARGET``.
"""

from __future__ import annotations

SERVICE = "proxy"
PURPOSE = "proxy"
ALIAS = "proxy"
PORT = 8443
PROGRAM = "/usr/local/bin/corral-proxy"
DIAL_TARGET = "/corral-dial"
DIAL_SOCKET = "dial.sock"
# Names that exist, one of which ``corral verify`` asks a proxy or an answerer for that may not tell of it.
CHECKED = ("example.com", "example.net", "example.org", "iana.org")
# Files in a sandbox's directory: locked by who makes or removes its proxy; shared by whoever uses it, from
# before it looks for it.
LOCK, USE = "proxy.lock", "proxy.use"
