"""What only an engine of the user's own has: slirp4netns between its network and the host, and addresses behind it.

Each context manager changes nothing where the engine is the system's.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from .host import OWN_NAMESPACES, Done, Host

LOOPBACK = "10.0.2.2"
"""The host's loopback, when slirp4netns is told to lead there."""
RESOLVER = "10.0.2.3"
"""The resolver of the host."""
OWN = "10.0.2.100"
"""The engine's own address on its way to slirp4netns."""

_DROP_IN = "/home/dev/.config/systemd/user/docker.service.d/slirp.conf"


def near(host: Host, *argv: str, check: bool = True) -> Done:
    """Run a program as the host's user where the engine's bridges are."""
    enter = OWN_NAMESPACES if host.box.engine.rootless else ""
    return host.shell(enter + shlex.join(argv), check=check)


@contextlib.contextmanager
def _started_with(host: Host, variable: str, value: str) -> Iterator[None]:
    if not host.box.engine.rootless:
        yield
        return

    def again() -> None:
        host.user_systemctl("daemon-reload")
        host.restart_docker()
        host.wait_enforcer()

    host.box.write(_DROP_IN, f"[Service]\nEnvironment={variable}={value}\n")
    try:
        again()
        yield
    finally:
        host.root("rm", "-f", _DROP_IN)
        again()


def with_loopback(host: Host) -> contextlib.AbstractContextManager[None]:
    """Have slirp4netns lead to the host's loopback: the least closed one there is. All sandboxes end."""
    return _started_with(host, "DOCKERD_ROOTLESS_ROOTLESSKIT_DISABLE_HOST_LOOPBACK", "false")


@contextlib.contextmanager
def with_ipv6(host: Host) -> Iterator[None]:
    """Have slirp4netns pass IPv6, which it does not by itself. All sandboxes end."""
    with _started_with(host, "DOCKERD_ROOTLESS_ROOTLESSKIT_FLAGS", "--ipv6"):
        if host.box.engine.rootless:
            # Docker switches forwarding on with its first network of IPv6, and the kernel then forgets the default
            # route that slirp4netns announces.
            host.netadmin_shell("echo 2 > /proc/sys/net/ipv6/conf/tap0/accept_ra")
        yield
