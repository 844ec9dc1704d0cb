"""A box whose only engine is the user's own: no daemon of the system, no group docker, no sudo.

Written as ``dockerd-rootless-setuptool.sh install`` leaves a host, minus what that tool adds where it cannot load
kernel modules (``--iptables=false``): this machine's kernel has them built in.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from . import execute, layout

DATA = f"home/{layout.USER}/.local/share/docker"
SOCKET = f"unix:///run/user/{layout.UID}/docker.sock"
# The box has the machine's device bound in; the user's engine needs one that the user may open.
TUN = "\numount /dev/net/tun\nrm -f /dev/net/tun\nmknod -m 0666 /dev/net/tun c 10 200\n"
_SYSTEM = ("docker.service", "docker.socket", "containerd.service")
_UNIT = """\
[Unit]
Description=Docker Application Container Engine (Rootless)
Documentation=https://docs.docker.com/go/rootless/

[Service]
Environment=PATH=/usr/share/docker.io/contrib:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
ExecStart=/usr/share/docker.io/contrib/dockerd-rootless.sh
ExecReload=/bin/kill -s HUP $MAINPID
TimeoutSec=0
RestartSec=2
Restart=always
StartLimitBurst=3
StartLimitInterval=60s
LimitNOFILE=infinity
LimitNPROC=infinity
LimitCORE=infinity
TasksMax=infinity
Delegate=yes
Type=notify
NotifyAccess=all
KillMode=mixed

[Install]
WantedBy=default.target
"""


def provision(root: Path) -> None:
    """Write it into the mounted root of a box that does not run yet and has its user."""
    home = root / "home" / layout.USER
    execute.run([execute.tool("chroot"), str(root), "/usr/bin/gpasswd", "-d", layout.USER, "docker"])
    (root / f"etc/sudoers.d/{layout.USER}").unlink()
    for unit in _SYSTEM:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    units = home / ".config/systemd/user"
    _write(units / "docker.service", _UNIT)
    (units / "default.target.wants").mkdir()
    (units / "default.target.wants/docker.service").symlink_to("../docker.service")
    context = {"Name": "rootless", "Metadata": {}, "Endpoints": {"docker": {"Host": SOCKET}}}
    key = hashlib.sha256(b"rootless").hexdigest()
    _write(home / f".docker/contexts/meta/{key}/meta.json", json.dumps(context))
    _write(home / ".docker/config.json", json.dumps({"currentContext": "rootless"}))
    (root / DATA).mkdir(parents=True)
    for path in (home, *home.rglob("*")):
        os.chown(path, layout.UID, layout.UID, follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
