"""Builds an agent's image, with BuildKit through Docker's CLI or with the classic builder through its API.

Proxies reach the build as Docker's predefined build arguments only. They may carry a password, so the CLI is
told their names and takes the values from its environment, and nothing that is printed or kept shows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agent_image.buildlog import BuildLog, Progress
from agent_image.context import LABEL_IMAGE, LABEL_INPUTS, digest, exclusive, write_sealed
from agent_image.spec import ImageSpec
from policy.errors import EngineError
from policy.records import dataclass

PROXY_NAMES = ("http_proxy", "https_proxy", "no_proxy")
MISSING = 127
# What leads Docker's CLI away from the engine that it is told of.
_DETOURS = frozenset(
    {"BUILDX_BUILDER", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS", "DOCKER_TLS_VERIFY"}
)
_STEP = re.compile(r"^The command '.*' (?=returned )", re.DOTALL)


class Runner(Protocol):
    """Runs one program to its end."""

    def run(self, argv: Sequence[str], env: Mapping[str, str], on_line: Progress) -> int:
        """Return the exit code; 127 when there is no such program.

        ``on_line`` gets each line of stdout and stderr as it comes, without its end. stdin is empty.
        """


class ImageApi(Protocol):
    """What is used of docker-py's low-level API (``client.api``)."""

    def inspect_image(self, image: str) -> dict[str, Any]:
        """Return the image's description; raises docker.errors.ImageNotFound."""

    def build(self, **options: Any) -> Iterator[dict[str, Any]]:
        """Build with the classic builder and yield its messages."""


@dataclass(frozen=True)
class Built:
    """What came out: the image's id, the hash of its inputs, and who built it.

    ``builder`` is "buildkit", "classic", or None when the image was there already, with the same inputs.
    """

    image: str
    inputs: str
    builder: str | None


def build(
    spec: ImageSpec,
    *,
    tag: str,
    directory: Path,
    log: Path,
    api: ImageApi,
    engine: str,
    runner: Runner,
    environ: Mapping[str, str],
    proxies: Mapping[str, str] | None = None,
    progress: Progress = lambda _: None,
    force: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> Built:
    """Make sure that ``tag`` is the image of ``spec``.

    Args:
        spec: the inputs.
        tag: name the image gets, e.g. ``corral/<sandbox id>:latest``.
        directory: the build context, replaced as a whole.
        log: where everything the build prints is kept; its directory exists.
        api: docker-py's ``client.api``.
        engine: address of the engine that ``api`` talks to, e.g. ``unix:///var/run/docker.sock``.
        runner: runs ``docker``.
        environ: environment of the ``docker`` command; what it says about engines has no effect.
        proxies: http_proxy, https_proxy, no_proxy; an empty value means none.
        progress: gets each line the build prints.
        force: build although the inputs are the same.
        ready: called before something is built; what it raises ends it.

    Raises:
        PolicyError: the inputs cannot be used.
        EngineError: Docker failed; the message ends with the last lines, the hint names the log.
        CorralError: somebody else could write to the build directory, or something in it was changed.
    """
    # Even when nothing is built: what lies there is what the image was made from.
    with exclusive(directory):
        write_sealed(spec, directory)
    inputs = digest(spec)
    present = _inspect(api, tag)
    if present and not force and _label(present) == inputs:
        return Built(present["Id"], inputs, None)
    ready()
    arguments = both_cases(proxies or {})
    environ = cli_environment(environ, engine)
    buildkit = uses_buildkit(environ, runner)
    with BuildLog(log, arguments.values(), progress) as record:
        if buildkit:
            failure = _with_cli(runner, environ, arguments, tag, inputs, directory, record)
        else:
            failure = _with_api(api, arguments, tag, inputs, directory, record)
    if failure is not None:
        raise EngineError(record.failed(failure), record.hint())
    made = _inspect(api, tag)
    if made is None or _label(made) != inputs:
        raise EngineError(
            f"the build ended well, but the engine has no image {tag} made from it",
            "look at the builder of the docker command: docker buildx inspect",
        )
    return Built(made["Id"], inputs, "buildkit" if buildkit else "classic")


def cli_environment(environ: Mapping[str, str], engine: str) -> dict[str, str]:
    """Return the environment with which the ``docker`` command talks to ``engine``, whatever its context."""
    kept = {name: value for name, value in environ.items() if name not in _DETOURS}
    return {**kept, "DOCKER_HOST": engine}


def uses_buildkit(environ: Mapping[str, str], runner: Runner) -> bool:
    """Say whether to build with BuildKit: the user has not switched it off and the buildx plugin works."""
    if environ.get("DOCKER_BUILDKIT", "1").strip().lower() in {"0", "false"}:
        return False
    return runner.run(("docker", "buildx", "version"), environ, lambda _: None) == 0


def both_cases(proxies: Mapping[str, str]) -> dict[str, str]:
    """Return the build arguments for ``proxies``: apt reads only lower-case names, others upper-case ones."""
    arguments = {}
    for name in PROXY_NAMES:
        value = proxies.get(name) or proxies.get(name.upper())
        if value:
            arguments[name] = arguments[name.upper()] = value
    return arguments


def _with_cli(
    runner: Runner,
    environ: Mapping[str, str],
    arguments: Mapping[str, str],
    tag: str,
    inputs: str,
    directory: Path,
    record: BuildLog,
) -> str | None:
    """Build with BuildKit; return why it failed."""
    # The plugin by its own name: where it is not the default, `docker build` does not know --load, without
    # which a builder in a container keeps the image to itself.
    argv = ["docker", "buildx", "build", "--load", "--progress", "plain"]
    argv += ["--tag", tag, "--label", f"{LABEL_INPUTS}={inputs}", "--label", f"{LABEL_IMAGE}={tag}"]
    for name in sorted(arguments):
        argv += ["--build-arg", name]
    code = runner.run((*argv, str(directory)), {**environ, **arguments}, record.line)
    return None if code == 0 else f"docker buildx build ended with exit code {code}"


def _with_api(
    api: ImageApi, arguments: Mapping[str, str], tag: str, inputs: str, directory: Path, record: BuildLog
) -> str | None:
    """Build with the classic builder; return why it failed."""
    import requests
    from docker.errors import DockerException

    try:
        messages = api.build(
            path=str(directory),
            tag=tag,
            rm=True,
            forcerm=True,
            pull=False,
            buildargs=dict(arguments),
            labels={LABEL_INPUTS: inputs, LABEL_IMAGE: tag},
            decode=True,
        )
        for message in messages:
            if "error" in message:
                # The engine repeats the whole step, which the log has already.
                return _STEP.sub("a step ", str(message["error"]).strip())
            record.text(_text(message))
    except (DockerException, requests.RequestException, OSError) as error:
        return f"Docker refused or went away: {error}"
    return None


def _text(message: Mapping[str, Any]) -> str:
    if "stream" in message:
        return str(message["stream"])
    # A pull of the base: its progress bars are left out, its states are not.
    if "status" in message and "progress" not in message:
        return " ".join(str(message[key]) for key in ("id", "status") if key in message) + "\n"
    return ""


def _inspect(api: ImageApi, tag: str) -> dict[str, Any] | None:
    try:
        return api.inspect_image(tag)
    except Exception as error:
        # Imported when there is one: the SDK takes its time.
        import requests
        from docker.errors import DockerException, ImageNotFound

        if isinstance(error, ImageNotFound):
            return None
        if isinstance(error, DockerException | requests.RequestException):
            text = f"Docker does not answer: {error}"
            raise EngineError(text, "start it: systemctl start docker") from error
        raise


def _label(image: Mapping[str, Any]) -> str | None:
    labels = (image.get("Config") or {}).get("Labels") or {}
    value = labels.get(LABEL_INPUTS)
    return value if isinstance(value, str) else None
