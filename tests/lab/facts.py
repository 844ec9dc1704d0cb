"""What a box is made of, read from the box itself: for results, so that nobody has to believe a table."""

from __future__ import annotations

import json
import platform

from .box import Box


def describe(box: Box) -> dict[str, str]:
    """Versions of what corral stands on, as the box's own programs tell them."""
    engine = json.loads(box.run(["docker", "version", "--format", "{{json .Server}}"]).stdout)
    parts = {part["Name"]: part["Version"] for part in engine["Components"]}
    release = dict(line.split("=", 1) for line in box.read("/etc/os-release").splitlines() if "=" in line)
    unlimited = box.unlimited()
    return {
        "engine": f"Docker Engine {engine['Version']}",
        "containerd": parts.get("containerd", ""),
        "runc": parts.get("runc", ""),
        "system": release["PRETTY_NAME"].strip('"'),
        "systemd": box.run(["systemctl", "--version"]).stdout.split("\n")[0].removeprefix("systemd "),
        "iptables": box.run(["iptables", "--version"], user="root").stdout.strip().removeprefix("iptables "),
        "python": box.run(["python3", "--version"]).stdout.strip().removeprefix("Python "),
        "control groups": box.arrangement.value,
        "limits": f"discarded: {', '.join(unlimited)}" if unlimited else "real",
        "kernel": platform.release().split("-")[0],
    }
