"""File trees of the lab, built once and kept in the cache by content: the box, the base image, dnsmasq."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from . import execute, layout, machine
from .engines import Engine
from .execute import Steps
from .layout import Layout
from .registries import Registries, npm_default
from .state import locked, mounts_below, overlay_lowers, remove_tree

_PURGED = ("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/groff", "var/lib/apt/lists")
_MASKED = (
    # Work of the real machine, not of a box on it.
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "fstrim.timer",
    "systemd-modules-load.service",
)


class Trees:
    """The cached trees of one machine; each method returns a complete path that nobody writes to."""

    def __init__(self, lab: Layout, registries: Registries, steps: Steps) -> None:
        self._cache = lab.cache
        self._registries = registries
        self._steps = steps

    def box(self, engine: Engine) -> Path:
        """Root file system of the box: the lower layer of its overlay."""
        ingredients = (
            engine.suite,
            engine.packages,
            _MASKED,
            self._registries.mirror,
            self._registries.security,
        )
        return self._cached(
            _box_kind(engine), layout.tree_key(*ingredients), lambda tree: self._build_box(engine, tree)
        )

    def base_image(self) -> Path:
        """Tar archive (zstd) of the slim Debian that Dockerfiles start from."""
        found = self._registries
        ingredients = (layout.BASE_SUITE, _PURGED, found.mirror, found.security, found.apt_options)
        return self._cached("base", layout.tree_key(*ingredients), self._build_base) / "image.tar.zst"

    def dnsmasq(self) -> Path:
        """The DNS server's executable, extracted and never installed."""
        release = execute.read_text(Path("/etc/os-release"))
        tree = self._cached("dnsmasq", layout.tree_key(release), self._build_dnsmasq)
        return tree / "usr/sbin/dnsmasq"

    def npm_registry(self) -> str:
        """The registry an unconfigured npm asks: in the client that corral's images are built with."""
        from agent_image.harnesses import client

        architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        requirement = client(architecture).requirement
        tree = self._cached(
            "npm", layout.tree_key(requirement), lambda tree: _fetch_npm_default(tree, requirement)
        )
        return (tree / "registry").read_text()

    def missing(self, engine: Engine) -> list[str]:
        """Which of the big trees would have to be built."""
        return [
            kind
            for kind in (_box_kind(engine), "base")
            if not list((self._cache / "trees").glob(f"{kind}-*"))
        ]

    def _cached(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        trees = self._cache / "trees"
        final = trees / f"{kind}-{key}"
        if final.is_dir():
            return final
        trees.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that makes {kind}"
        with locked(trees / f"{kind}.lock", kind, wait=lambda: self._steps.say(waiting)):
            if final.is_dir():
                return final
            partial = trees / f"partial-{kind}"
            _clear(partial)
            partial.mkdir(mode=0o755)
            with self._steps(f"making {kind} ({final.name}) from nothing"):
                try:
                    build(partial)
                except BaseException:
                    _clear(partial)
                    raise
            partial.rename(final)
            self._forget(kind, final)
        return final

    def _forget(self, kind: str, current: Path) -> None:
        """Keep the two newest trees of a kind and those a running box stands on."""
        used = overlay_lowers(Path("/proc/self/mountinfo").read_text())
        others = sorted(
            (tree for tree in current.parent.glob(f"{kind}-*") if tree != current),
            key=lambda tree: tree.stat().st_mtime,
        )
        for tree in others[:-1]:
            if str(tree) not in used:
                remove_tree(tree)

    def _build_box(self, engine: Engine, tree: Path) -> None:
        self._debootstrap(engine.suite, tree)
        _write(tree / "usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", 0o755)
        _write(tree / "etc/dpkg/dpkg.cfg.d/lab", "force-unsafe-io\n")
        self._apt_sources(tree, engine.suite, engine.released)
        apt = [*_apart(), "chroot", str(tree), "/usr/bin/env", "-i", "DEBIAN_FRONTEND=noninteractive"]
        apt += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "apt-get", "-q", *self._apt_way_out(tree)]
        shutil.copy("/etc/resolv.conf", tree / "etc/resolv.conf")
        execute.run([*apt, "update"], timeout=300)
        execute.run([*apt, "install", "-y", "--no-install-recommends", *engine.packages], timeout=900)
        execute.run([*apt, "clean"])
        for name in _MASKED:
            _link(tree / "etc/systemd/system" / name, "/dev/null")
        for leftover in ("usr/sbin/policy-rc.d", "etc/dpkg/dpkg.cfg.d/lab", "tmp/lab-ca.crt"):
            (tree / leftover).unlink(missing_ok=True)
        _write(tree / "etc/machine-id", "")
        _link(tree / "etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")
        (tree / "var/log/journal").mkdir(exist_ok=True)

    def _build_base(self, tree: Path) -> None:
        root = tree / "root"
        self._debootstrap(layout.BASE_SUITE, root)
        self._apt_sources(root, layout.BASE_SUITE)
        for directory in _PURGED:
            shutil.rmtree(root / directory, ignore_errors=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        for cached in (root / "var/cache/apt").rglob("*.[db]*"):
            cached.unlink()
        for document in (root / "usr/share/doc").rglob("*"):
            if document.is_file() and document.name != "copyright":
                document.unlink()
        for name in ("etc/resolv.conf", "etc/hostname", "etc/machine-id"):
            (root / name).unlink(missing_ok=True)
        archive = str(tree / "image.tar.zst")
        pack = 'tar -C "$1" --numeric-owner -c . | zstd -q -6 -T0 -o "$2"'
        execute.run(["/bin/sh", "-e", "-c", pack, "pack", str(root), archive], timeout=300)
        remove_tree(root)

    def _build_dnsmasq(self, tree: Path) -> None:
        execute.run(
            [execute.tool("apt-get"), "-q", "-o", "APT::Sandbox::User=root", "download", "dnsmasq-base"],
            cwd=tree,
            timeout=120,
        )
        for package in tree.glob("*.deb"):
            execute.run([execute.tool("dpkg-deb"), "-x", str(package), str(tree)])
            package.unlink()
        machine.install_libraries("dnsmasq-base", self._steps)
        execute.run([str(tree / "usr/sbin/dnsmasq"), "--version"])

    def _debootstrap(self, suite: str, tree: Path) -> None:
        archives = self._cache / "debs" / suite
        archives.mkdir(parents=True, exist_ok=True)
        command = [*_apart(), execute.tool("debootstrap"), "--variant=minbase", "--include=ca-certificates"]
        command += [f"--cache-dir={archives}", suite, str(tree), self._registries.mirror]
        execute.run(command, timeout=900)

    def _apt_sources(self, tree: Path, suite: str, released: bool = True) -> None:
        """Sources as the machine has them, for that suite."""
        (tree / "etc/apt/sources.list").unlink(missing_ok=True)
        _write(
            tree / "etc/apt/sources.list.d/debian.sources",
            apt_sources(suite, self._registries.mirror, self._registries.security, released),
        )
        options = "".join(f'{key} "{value}";\n' for key, value in self._registries.apt_options)
        if options:
            _write(tree / "etc/apt/apt.conf.d/50machine", options)

    def _apt_way_out(self, tree: Path) -> list[str]:
        """Options that let apt inside the tree use the machine's proxy and trust its CAs."""
        options = ["-o", "APT::Sandbox::User=root"]
        trusted = Path("/etc/ssl/certs/ca-certificates.crt")
        if trusted.exists():
            shutil.copy(trusted, tree / "tmp/lab-ca.crt")
            options += ["-o", "Acquire::https::CAInfo=/tmp/lab-ca.crt"]
        for scheme, proxy in self._registries.upstream.items():
            options += ["-o", f"Acquire::{scheme}::Proxy={proxy}"]
        return options


def _box_kind(engine: Engine) -> str:
    return f"box-{engine.suite}"


def _fetch_npm_default(tree: Path, requirement: str) -> None:
    wheels = tree / "wheels"
    wanted = tree / "requirement"
    wanted.write_text(f"{requirement}\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    execute.run([*pip, "--require-hashes", "-r", str(wanted), "-d", str(wheels)], timeout=300)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/@npmcli/config/lib/definitions/definitions.js"):
                    default = npm_default(archive.read(name).decode())
                    (tree / "registry").write_text(default or "")
    remove_tree(wheels)


def apt_sources(suite: str, mirror: str, security: str | None, released: bool = True) -> str:
    """A deb822 sources file; a suite that is not released has neither updates nor security fixes."""
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    stanzas = [(mirror, f"{suite} {suite}-updates" if released else suite)]
    if security and released:
        stanzas.append((security, f"{suite}-security"))
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nSigned-By: {keyring}\n"
        for uri, suites in stanzas
    )


def _apart() -> list[str]:
    """Run in own mount and pid namespaces: whatever it starts or mounts ends with it, and it ends with us."""
    deadly = [execute.tool("setpriv"), "--pdeathsig", "KILL"]
    return [*deadly, execute.tool("unshare"), "--mount", "--pid", "--fork", "--kill-child"]


def _clear(partial: Path) -> None:
    for point in mounts_below([partial], Path("/proc/self/mountinfo").read_text()):
        execute.run([execute.tool("umount"), "--lazy", str(point)], check=False)
    remove_tree(partial)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
