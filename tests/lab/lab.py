"""A lab's life: brought up from nothing or from the cache, used again while it is good, taken down."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import trustme

from . import (
    engines,
    execute,
    layout,
    machine,
    network,
    product,
    provision,
    registries,
    rootless,
    state,
    trees,
)
from .box import Box
from .engines import Engine
from .execute import LabError, Steps
from .internet import Internet
from .layout import Layout, netns_path
from .registries import Registries
from .state import State

_HERE = Path(__file__).parent
_DAEMONS = ("nspawn", "leader", "dns", "servers", "proxy")


class Lab:
    """A running lab: `box` and `internet`. Made by `up` or `attach`."""

    def __init__(self, lab: Layout) -> None:
        self._layout = lab
        self._state = State(lab)
        self._held: contextlib.ExitStack | None = None
        self.name = lab.name
        self.box = Box(lab, self._state)
        self.internet = Internet(lab, self._state)

    @classmethod
    def up(
        cls,
        name: str | None = None,
        keep: bool | None = None,
        steps: Steps | None = None,
        engine: str | None = None,
    ) -> Lab:
        """Bring a lab up and hold it for this process; a kept one is used again when it is healthy and ours.

        `keep` (default: CORRAL_LAB_KEEP=1) leaves it up at `close`; `engine` (default: CORRAL_LAB_ENGINE, else
        trixie) is what its box has. Raises LabError.
        """
        wanted = engines.chosen(engine)
        lab = cls(Layout.of(name))
        keep = os.environ.get("CORRAL_LAB_KEEP") == "1" if keep is None else keep
        steps = steps or Steps()
        with contextlib.ExitStack() as stack:
            stack.enter_context(state.locked(lab._layout.lock, f"lab {lab.name}"))
            lab._raise(wanted, keep, steps)
            lab._held = stack.pop_all()
        return lab

    @classmethod
    def named(cls, name: str | None = None) -> Lab:
        """A handle on a lab that may be up, down or broken."""
        return cls(Layout.of(name))

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """A handle on a lab that is up, without holding it. Raises LabError when it is not up."""
        lab = cls.named(name)
        if not lab.ready():
            raise LabError(f"lab {lab.name} is not up", "make lab")
        return lab

    def install_corral(self, steps: Steps | None = None, project: Path = product.PROJECT) -> str:
        """Install the work tree's corral in the box for `dev`, when it changed; name and version."""
        return product.install(self._layout, self.box, steps or Steps(), project)

    def down(self) -> None:
        """Take the lab down and remove every trace. Raises LabError when another process holds it."""
        if self._held is None:
            with state.locked(self._layout.lock, f"lab {self.name}"):
                state.sweep(self._layout)
            return
        state.sweep(self._layout)
        self._release()

    def close(self) -> None:
        """Let go of the lab; take it down unless it is to be kept."""
        if self._state.note("kept") == "yes":
            self._release()
        else:
            self.down()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> bool:
        """Whether the lab came up completely and all its processes still run."""
        return self._state.note("ready") == "yes" and all(self._state.alive(role) for role in _DAEMONS)

    def status(self) -> Mapping[str, str]:
        """What there is of the lab, for people."""
        if not state.remains(self._layout):
            return {"lab": f"{self.name}: down"}
        said = "up" if self.ready() else "broken (a leftover)"
        engine = self._state.note("engine") or "unknown engine"
        found = {
            "lab": f"{self.name} ({engine}): {said}" + (", kept" if self._state.note("kept") == "yes" else "")
        }
        for role, process in sorted(self._state.processes().items()):
            found[role] = f"pid {process.pid}" if process.alive() else "gone"
        return found | {"files": f"{self._layout.run}, {self._layout.disk}"}

    def _raise(self, engine: Engine, keep: bool, steps: Steps) -> None:
        if self._reusable(engine):
            with steps(f"using lab {self.name}, which is up"):
                self.internet.reset_names()
                self.internet.reset_counters()
                self.box.use_resolver("stub")
                self.box.flush_dns()
            if keep:
                self._state.set_notes(kept="yes")
            return
        if state.remains(self._layout):
            with steps(f"removing what is left of lab {self.name}"):
                state.sweep(self._layout)
        try:
            self._make(engine, steps)
        except BaseException:
            state.sweep(self._layout)
            raise
        self._state.set_notes(ready="yes", kept="yes" if keep else "no", code=layout.code_key())
        steps.say(f"lab {self.name} ({engine.name}) is up after {steps.total():.1f} s")

    def _reusable(self, engine: Engine) -> bool:
        return (
            self._state.note("kept") == "yes"
            and self._state.note("engine") == engine.name
            and self._state.note("code") == layout.code_key()
            and self.ready()
            and self.box.healthy()
        )

    def _make(self, engine: Engine, steps: Steps) -> None:
        machine.prepare(steps)
        found = registries.read_registries()
        cache = trees.Trees(self._layout, found, steps)
        machine.check_room(
            self._layout.cache, machine.ROOM_BOX + (machine.ROOM_TREES if cache.missing(engine) else 0)
        )
        if not found.npm_known:
            found = found.with_npm_default(cache.npm_registry())
        dnsmasq = cache.dnsmasq()
        tree, image = execute.both(lambda: cache.box(engine), cache.base_image)
        self._layout.run.mkdir(parents=True, mode=0o755)
        self._state.set_notes(dnsmasq=str(dnsmasq), engine=engine.name)
        with steps("starting the internet"):
            self._make_internet(found)
        with steps("booting the box"):
            self.box.mount(tree)
            provision.provision(self._layout, found)
            if engine.rootless:
                rootless.provision(self._layout.root)
            provision.arrange(self._layout.root, engine, self.box.arrangement, self._state.groups.hierarchies)
            self.box.boot()
        if unlimited := self.box.unlimited():
            steps.say(
                f"this machine has no controllers for {', '.join(unlimited)}: the engine discards those"
            )
        with steps(f"importing {layout.BASE_IMAGE}"):
            self._import(image)

    def _make_internet(self, found: Registries) -> None:
        lab = self._layout
        authority = trustme.CA(organization_name="corral lab")
        authority.cert_pem.write_to_path(lab.ca_certificate)
        lab.ca_key.touch(mode=0o600)
        authority.private_key_pem.write_to_path(lab.ca_key)
        lab.files.mkdir()
        network.make_internet(lab)
        self.internet.reset_names()
        addresses = sorted({address for several in layout.NAMES.values() for address in several})
        groups = self._state.groups.make("internet")
        argv = [
            execute.tool("nsenter"), f"--net={netns_path(lab.inet_netns)}",
            sys.executable, str(_HERE / "servers.py"),
            "--ca", str(lab.ca_certificate), "--key", str(lab.ca_key), "--files", str(lab.files),
            "--sink-port", str(layout.SINK_PORT), "--echo-port", str(layout.ECHO_PORT),
        ]  # fmt: skip
        for address in addresses:
            argv += ["--address", address]
        servers = execute.start_daemon(argv, log=lab.run / "servers.log", cgroups=groups, ready=True)
        self._state.put("servers", servers)
        config = lab.run / "proxy.json"
        config.touch(mode=0o600)
        config.write_text(found.proxy_config())
        argv = [
            sys.executable, str(_HERE / "registry_proxy.py"), "--netns", str(netns_path(lab.inet_netns)),
            "--address", layout.GATEWAY, "--port", str(layout.PROXY_PORT), "--config", str(config),
        ]  # fmt: skip
        proxy = execute.start_daemon(argv, log=lab.run / "proxy.log", cgroups=groups, ready=True)
        self._state.put("proxy", proxy)

    def _import(self, image: Path) -> None:
        command = ["docker", "import", "--change", 'CMD ["bash"]', "-", layout.BASE_IMAGE]
        with execute.output_of([execute.tool("zstd"), "-dcq", str(image)]) as archive:
            self.box.run(command, stdin=archive, timeout=120)  # not every engine reads zstd

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
