"""``corral build``: the image of a sandbox, made again when what goes into it changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from corral import existing, network, room, state
from corral.context import Invocation
from corral.engine import base_url, errors
from policy.errors import CorralError, PolicyError
from policy.hostclient import BuildEnvironment, Proxies, RealFiles, gather, merge, suite_of
from policy.loader import LoadedPolicy
from policy.urls import is_loopback, redact

if TYPE_CHECKING:
    from agent_image.builder import Built, ImageApi
    from agent_image.foreign import Api as ForeignApi
    from agent_image.foreign import Foreign
    from agent_image.spec import ImageSpec
    from corral.building import Building
    from corral.console import Console, Step


def image_spec(
    loaded: LoadedPolicy,
    *,
    uid: int,
    gid: int,
    architecture: str,
    host: BuildEnvironment,
    certificates: Iterable[bytes],
    rootless: bool = False,
    foreign: Foreign | None = None,
    baseline: bool = False,
) -> ImageSpec:
    """Return what the sandbox's image is made from.

    Args:
        loaded: the policy.
        uid, gid: the host user's.
        architecture: the engine's, in Docker's words.
        host: how a build reaches the world; the policy's own wishes are merged into it.
        certificates: contents of its CA files.
        rootless: whether the engine is the user's own.
        foreign: the existing image that the policy names, if it does.
        baseline: whether the engine's processor has no AVX2.

    Raises:
        PolicyError: a value cannot be used.
    """
    from agent_image.spec import ImageSpec

    profile = loaded.profile
    return ImageSpec(
        uid=uid,
        gid=gid,
        architecture=architecture,
        harness=profile.name,
        base=loaded.policy.build.base_image,
        packages=profile.debian_packages,
        lines=profile.image_lines,
        owned_dirs=profile.owned_dirs,
        baked_files=profile.baked_files(loaded.options),
        ca_certificates=tuple(certificates),
        apt_mirror=host.apt_mirror,
        apt_security_mirror=host.apt_security_mirror,
        apt_options=host.apt_options,
        npm_registry=host.npm_registry,
        pip_index=host.pip_index,
        rootless=rootless,
        foreign=foreign,
        baseline=baseline,
    )


def without_avx2(cpuinfo: str) -> bool:
    """Say whether /proc/cpuinfo tells of a processor that programs built for AVX2 do not run on."""
    flags = [line for line in cpuinfo.splitlines() if line.startswith("flags")]
    return bool(flags) and "avx2" not in flags[0].partition(":")[2].split()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def build_proxies(host: BuildEnvironment) -> Proxies:
    """Return the proxies of a build: one that only apt.conf names serves where no other is set.

    It may hold credentials, so it travels as a build argument, not in a layer of the image.
    """
    found = host.proxies
    return replace(
        found,
        http=found.http or host.apt_proxy,
        https=found.https or host.apt_https_proxy,
    )


def unreachable_proxies(proxies: Proxies) -> list[str]:
    """Return warnings about proxies that are the build's own loopback once the build asks them."""
    return [
        f"the build cannot use the {name} proxy {redact(url)}: it is on this host's loopback, which a build "
        f"does not reach; let it listen on an address that containers reach and set build.proxy.{name} to "
        f"that, or set build.proxy.{name} to '' to build without it"
        for name, url in (("http", proxies.http), ("https", proxies.https))
        if url and is_loopback(url)
    ]


def read_certificates(files: Iterable[str]) -> list[bytes]:
    """Return the certificates of PEM files, without whatever else is in them.

    Raises:
        PolicyError: a file cannot be read.
    """
    from policy.clientfiles import certificates

    found = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise PolicyError(
                f"cannot read the CA certificates in {file}: {error.strerror}", "see build.ca_certificates"
            ) from error
        found += [pem.encode() for pem in certificates(text)]
    return found


def inputs(
    invocation: Invocation, loaded: LoadedPolicy, *, force: bool = False
) -> tuple[ImageSpec, BuildEnvironment]:
    """Return what the image of a policy is made from on this host, and how its build reaches the world.

    Args:
        invocation, loaded: who, and which policy.
        force: an existing image may be another one than before.

    Raises:
        PolicyError: a value cannot be used.
        CorralError: an existing image is not there, or cannot be used.
        EngineError: Docker does not answer.
    """
    user, image = invocation.user, loaded.policy.image
    foreign = None
    if image is not None:
        root, tell = invocation.read_paths.root, invocation.console.warn
        foreign = existing.find(invocation.api, image, loaded.sandbox, root, tell, force=force)
    suite = suite_of(loaded.policy.build.base_image)
    host = merge(loaded.policy.build, gather(user.home, user.environ, RealFiles(), suite))
    spec = image_spec(
        loaded,
        uid=user.uid,
        gid=user.gid,
        architecture=invocation.architecture,
        host=host,
        certificates=read_certificates(host.ca_files),
        rootless=user.rootless,
        foreign=foreign,
        # The engine is on this host: corral speaks to a socket only.
        baseline=without_avx2(_cpuinfo()),
    )
    return spec, host


def ensure_image(invocation: Invocation, *, force: bool = False) -> Built:
    """Build the sandbox's image unless it is there and nothing that goes into it changed.

    Raises:
        PolicyError, EngineError, CorralError: see ``agent_image.builder.build``.
    """
    from agent_image.builder import build
    from agent_image.runner import SubprocessRunner

    loaded, user, console = invocation.approved, invocation.user, invocation.console
    image = loaded.policy.image
    if image is not None and existing.look(invocation.api, image) is None:
        pin = existing.read(invocation.read_paths.root, force=force)
        if pin is None or pin.reference != image or existing.look(invocation.api, pin.ident) is None:
            existing.pull(invocation.api, image, console.say)
    spec, host = inputs(invocation, loaded, force=force)
    for note in host.notes:
        console.detail(note)
    for note in loaded.from_host.notes:
        console.warn(f"egress.from_host: {note}")
    paths = invocation.paths
    state.remember_project(paths, loaded.project)
    proxies = build_proxies(host)
    with (
        console.step("image", minor=True) as step,
        _base(invocation, spec.foreign, force=force),
        contextlib.ExitStack() as stack,
    ):
        built = build(
            spec,
            tag=loaded.sandbox.image,
            directory=paths.build,
            log=paths.root / "build.log",
            api=cast("ImageApi", invocation.api),
            engine=base_url(user.environ),
            runner=SubprocessRunner(),
            environ=user.environ,
            proxies=proxies.variables(),
            progress=_Shown(console, step, stack, loaded.sandbox.id, proxies),
            force=force,
            ready=lambda: room.insist(invocation.api, loaded.sandbox.image, invocation.data),
        )
        if built.builder is None:
            step.note = "up to date"
        if spec.foreign is not None and built.builder is not None:
            _insist_on_base(invocation, spec.foreign)
    return built


class _Shown:
    """Takes the lines of a build, if there is one; ``stack`` is told of what is to be done when it ends."""

    def __init__(
        self, console: Console, step: Step, stack: contextlib.ExitStack, sandbox: str, proxies: Proxies
    ) -> None:
        self._console, self._step, self._stack = console, step, stack
        self._sandbox, self._proxies = sandbox, proxies
        self._building: Building | None = None

    def __call__(self, line: str) -> None:
        if self._building is None:
            # Most starts build nothing.
            from corral.building import Building

            self._announce()
            self._building = self._stack.enter_context(Building(self._console, self._step))
        self._building.line(line)

    def _announce(self) -> None:
        console = self._console
        console.say(f"building the image of {self._sandbox}; the first time takes a few minutes")
        console.detail("a build has the network of the engine: the sandbox's rules are not for it")
        for warning in unreachable_proxies(self._proxies):
            console.warn(warning)


def _insist_on_base(invocation: Invocation, foreign: Foreign) -> None:
    tag = invocation.loaded.sandbox.image
    try:
        existing.stands_on(invocation.api, tag, foreign)
    except CorralError:
        with errors(f"removing the image {tag}"):
            invocation.api.remove_image(tag)
        raise


@contextlib.contextmanager
def _base(invocation: Invocation, foreign: Foreign | None, *, force: bool) -> Iterator[None]:
    """Give an existing image the name that its build knows it by, and keep which one it is."""
    if foreign is None:
        yield
        return
    from docker.errors import ImageNotFound

    from agent_image.foreign import insist

    root, api = invocation.paths.root, invocation.api
    # Builds of one sandbox take turns: one name means one image at a time.
    with network.locked(root / "image.lock"):
        kept = existing.read(root, force=force)
        if kept != existing.Pin(foreign.reference, foreign.ident):
            insist(cast("ForeignApi", api), foreign)
            invocation.console.warn(existing.warning(foreign.reference, foreign.ident))
        with errors(f"naming the image {foreign.reference}"):
            api.tag(foreign.ident, *foreign.tag.rpartition(":")[::2])
        try:
            yield
        except BaseException:
            # The name is for the image that is kept, and this one is not.
            with errors(f"naming the image {foreign.reference}"), contextlib.suppress(ImageNotFound):
                api.remove_image(foreign.tag, noprune=True)
                if kept is not None:
                    api.tag(kept.ident, *foreign.tag.rpartition(":")[::2])
            raise
        existing.write(root, existing.Pin(foreign.reference, foreign.ident))


def build(invocation: Invocation, *, force: bool) -> str:
    """Do ``corral build`` and return the line to print."""
    built = ensure_image(invocation, force=force)
    tag = invocation.loaded.sandbox.image
    short = built.image.removeprefix("sha256:")[:12]
    if built.builder is None:
        return f"{tag} is up to date ({short})"
    return f"{tag} built ({short})"
