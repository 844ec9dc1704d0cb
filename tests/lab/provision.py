"""What one box has beyond its tree: the user, DNS, trust, and a corporate user's proxy settings.

Files are written into the overlay before the box boots, so that it boots the way a configured host does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from . import cgroups, execute, layout, rootless
from .cgroups import Arrangement, Hierarchy
from .engines import Engine
from .layout import Layout
from .registries import Registries

PROXY = f"http://{layout.GATEWAY}:{layout.PROXY_PORT}"
MACHINE_CAS = Path("/usr/local/share/ca-certificates")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


INIT = "/usr/local/lib/corral-lab/init"
_WITH_CGROUP1 = "/usr/local/lib/corral-lab/with-cgroup1"
_DAEMONS = {
    # In cgroup 2, which the box's systemd has, an engine gives each container a view of its own by default.
    "docker.service": ("--default-cgroupns-mode=private",),
    "containerd.service": (),
}


def provision(lab: Layout, registries: Registries) -> None:
    """Write everything into the mounted root of a box that does not run yet."""
    root = lab.root
    inside = [execute.tool("chroot"), str(root), "/usr/bin/env", "-i", f"PATH={PATH}"]
    uid = str(layout.UID)
    execute.run([*inside, "useradd", "--create-home", "--uid", uid, "--shell", "/bin/bash", layout.USER])
    execute.run([*inside, "usermod", "--append", "--groups", "docker", layout.USER])
    _write(root / f"etc/sudoers.d/{layout.USER}", f"{layout.USER} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    _write(root / f"var/lib/systemd/linger/{layout.USER}", "")
    _write(root / "etc/hostname", "box\n")
    _write(root / "etc/hosts", "127.0.0.1 localhost\n127.0.1.1 box\n::1 localhost ip6-localhost\n")
    _write(root / "etc/systemd/resolved.conf.d/lab.conf", resolved_conf())
    trust = root / "usr/local/share/ca-certificates"
    for certificate in MACHINE_CAS.rglob("*.crt"):
        shutil.copy(certificate, trust / certificate.name)
    shutil.copy(lab.ca_certificate, trust / "corral-lab.crt")
    execute.run([*inside, "update-ca-certificates"])
    with (root / "etc/environment").open("a") as file:
        file.writelines(f'{key}="{value}"\n' for key, value in proxy_environment().items())
    _write(root / "etc/apt/apt.conf.d/90proxy", apt_proxy())
    _write(root / "etc/pip.conf", pip_conf(registries.pip))
    if registries.npm:
        _write(root / "etc/npmrc", f"registry={registries.npm}\n")
        _write(root / f"home/{layout.USER}/.npmrc", f"registry={registries.npm}\n")
        shutil.chown(root / f"home/{layout.USER}/.npmrc", layout.UID, layout.UID)


def arrange(root: Path, engine: Engine, arrangement: Arrangement, hierarchies: Iterable[Hierarchy]) -> None:
    """Write what PID 1 is, and what makes limits real on a machine that has its controllers in cgroup 1."""
    _write(root / INIT[1:], init_script(engine, arrangement), 0o755)
    place_rules(root, engine)
    if arrangement is Arrangement.SPLIT:
        _write(root / _WITH_CGROUP1[1:], cgroups.engine_script(hierarchies), 0o755)
        for unit, arguments in _DAEMONS.items():
            shipped = (root / "usr/lib/systemd/system" / unit).read_text()
            dropin = cgroups.wrapped_unit(shipped, _WITH_CGROUP1, *arguments)
            _write(root / f"etc/systemd/system/{unit}.d/10-cgroup1.conf", dropin)


# The network address translation that an engine without rules leaves to the host.
_NAT = """\
table ip lab {
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr 172.17.0.0/16 oifname != "docker0" masquerade
  }
}
"""


def place_rules(root: Path, engine: Engine) -> None:
    """Make the engine keep its rules where this variant has them, from its first start on."""
    if engine.rules == "legacy":
        for name in ("iptables", "ip6tables"):
            inside = [execute.tool("chroot"), str(root), "/usr/bin/env", "-i", f"PATH={PATH}"]
            execute.run([*inside, "update-alternatives", "--set", name, f"/usr/sbin/{name}-legacy"])
    elif engine.rules == "none":
        _write(root / "etc/docker/daemon.json", '{"iptables": false, "ip6tables": false}\n')
        _write(root / "etc/nftables.conf", _NAT)
        wants = root / "etc/systemd/system/sysinit.target.wants"
        wants.mkdir(parents=True, exist_ok=True)
        (wants / "nftables.service").symlink_to("/usr/lib/systemd/system/nftables.service")


def init_script(engine: Engine, arrangement: Arrangement) -> str:
    """What becomes PID 1, after it has put right what nspawn does that a host does not."""
    script = "#!/bin/sh"
    if arrangement is Arrangement.HYBRID:
        script += cgroups.writable_script()
    if engine.rootless:
        script += rootless.TUN
    if not engine.own_boot_id:
        script += "\numount /proc/sys/kernel/random/boot_id\n"
    return f"{script}\nexec /lib/systemd/systemd\n"


def proxy_environment() -> dict[str, str]:
    """Both cases of each variable. What is served by the lab itself is not asked of the proxy."""
    direct = ["localhost", "127.0.0.1", "::1", ".corral.example", layout.SERVERS, *layout.NAMES]
    values = {"http_proxy": PROXY, "https_proxy": PROXY, "no_proxy": ",".join(direct)}
    return values | {key.upper(): value for key, value in values.items()}


def resolved_conf() -> str:
    lines = [
        f"DNS={layout.RESOLVER}",
        "FallbackDNS=",
        "Domains=~.",
        "LLMNR=no",
        "MulticastDNS=no",
        "DNSSEC=no",
    ]
    return "\n".join(["[Resolve]", *lines, ""])


def apt_proxy() -> str:
    return "".join(f'Acquire::{scheme}::Proxy "{PROXY}";\n' for scheme in ("http", "https"))


def pip_conf(options: tuple[tuple[str, str], ...]) -> str:
    """The machine's indexes (never local paths), and the system's trust store."""
    lines = [f"{key} = {value}" for key, value in options]
    return "\n".join(["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", *lines, ""])


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
