"""``corral render``: what a policy becomes, before anything of it exists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from corral import protect
from corral.build import inputs
from corral.context import Invocation
from corral.session import SERVICE, mounts
from policy import proxying
from policy.connection import HOST, OWN
from policy.container import HOSTS_TARGET, SessionSpec, labels, network_body, resolver_rows
from policy.declaration import ANSWER, Declaration
from policy.revision import revision

# What is decided when a session starts.
ADDRESS, PROXY, SESSION, SUBNET, GATEWAY, STRANGERS = (
    "<address>",
    "<the proxy's address>",
    "<session>",
    "<subnet>",
    "<gateway>",
    "<top quarter>",
)


def rendered(invocation: Invocation) -> dict[str, Any]:
    """Return the sandbox as its policy has it, with words in angle brackets for what a start decides.

    Raises:
        PolicyError: the policy.
        EngineError: Docker does not answer.
    """
    from agent_image.context import digest, files

    loaded, user = invocation.loaded, invocation.user
    spec, _ = inputs(invocation, loaded)
    context = files(spec)
    protected = protect.closed(loaded, user.environ)
    paths = invocation.read_paths
    session = SessionSpec(
        sandbox=loaded.sandbox,
        service=SERVICE,
        session=SESSION,
        purpose="run",
        uid=user.uid,
        gid=user.gid,
        image=loaded.sandbox.image,
        address=ADDRESS,
        hosts_file=str(paths.hosts(SESSION)),
        project=str(loaded.project),
        workdir=str(loaded.project),
        argv=loaded.profile.argv("interactive", loaded.options),
        declaration=loaded.declaration,
        connection=loaded.connection,
    )
    return {
        "sandbox": loaded.sandbox.id,
        "policy": revision(loaded).sha256,
        "image": {"tag": loaded.sandbox.image, "inputs": digest(spec)},
        "files": [
            {
                "path": file.path,
                "mode": f"{file.mode:04o}",
                "sha256": hashlib.sha256(file.content).hexdigest(),
            }
            for file in context
        ],
        "dockerfile": next(file.content.decode() for file in context if file.path == "Dockerfile"),
        "labels": labels(session),
        "mounts": [
            {"source": mount.source, "target": mount.target, "read_only": mount.read_only}
            for mount in mounts(loaded, paths, SESSION, protected)
        ]
        + (
            [{"source": session.hosts_file, "target": HOSTS_TARGET, "read_only": True}]
            if loaded.connection != HOST
            else []
        ),
        "network": network_body(loaded.sandbox, user.uid, SUBNET, GATEWAY, STRANGERS)
        if loaded.connection == OWN
        else {"NetworkMode": loaded.connection},
        "kernel": kernel(loaded.declaration),
    }


def kernel(declaration: Declaration) -> list[str]:
    """Return the elements that the sets of the kernel get for one session, or for what it asks."""
    pins = [
        f"corral-pins {ADDRESS},tcp:{port},<each address of {name.host}>"
        for name in declaration.names
        for port in name.ports
    ]
    askers = [PROXY] * declaration.proxied + [ADDRESS] * (declaration.dns == ANSWER)
    pins += [
        f"corral-pins {asker},tcp:{port},<each address of {pattern.host}, once it is asked for>"
        for asker in askers
        for pattern in declaration.patterns
        for port in pattern.ports
    ]
    services = [service.port for service in declaration.host_services]
    services += [proxying.PORT] * declaration.proxied
    rows = [(ADDRESS, "tcp", port, GATEWAY) for port in services]
    if declaration.answered:
        rows += sorted(resolver_rows(ADDRESS, GATEWAY))
    return pins + [f"corral-host {source},{proto}:{port},{target}" for source, proto, port, target in rows]


def text(body: Mapping[str, Any]) -> str:
    """Return it for people."""
    parts = [
        f"# sandbox {body['sandbox']}, policy {body['policy']}",
        f"# image {body['image']['tag']}, inputs {body['image']['inputs']}",
        "",
        "## Dockerfile",
        body["dockerfile"].rstrip("\n"),
        "",
        "## Files of the build",
        *(f"{row['mode']} {row['sha256'][:16]} {row['path']}" for row in body["files"]),
        "",
        "## Labels of a session's container",
        *(f"{name}={value}" for name, value in sorted(body["labels"].items())),
        "",
        "## Mounts",
        *(f"{'ro' if m['read_only'] else 'rw'} {m['source']} -> {m['target']}" for m in body["mounts"]),
        "",
        "## Network",
        json.dumps(body["network"], indent=2, sort_keys=True),
        "",
        "## NOT ENFORCED: the kernel denies nothing"
        if body["network"].get("NetworkMode") == HOST
        else "## Kernel entries; everything else is denied",
        *(body["kernel"] or ["none"]),
    ]
    return "\n".join(parts)


def differences(invocation: Invocation) -> list[str]:
    """Return how what is built differs from the policy, a line each; nothing is changed.

    Raises:
        PolicyError: the policy.
        EngineError: Docker does not answer.
        CorralError: somebody else could write to the build directory.
    """
    from docker.errors import ImageNotFound

    from agent_image.context import LABEL_INPUTS, digest
    from agent_image.context import differences as in_directory
    from corral.engine import errors

    loaded = invocation.loaded
    spec, _ = inputs(invocation, loaded)
    found = in_directory(spec, invocation.read_paths.build)
    with errors("looking at the image"):
        try:
            image = invocation.api.inspect_image(loaded.sandbox.image)  # type: ignore[no-untyped-call]
        except ImageNotFound:
            return [*found, f"there is no image {loaded.sandbox.image}"]
    made_from = ((image.get("Config") or {}).get("Labels") or {}).get(LABEL_INPUTS)
    if made_from != digest(spec):
        found.append(f"the image {loaded.sandbox.image} was made from other inputs")
    return found


def checked(found: Sequence[str]) -> str:
    """Return what ``--check`` prints."""
    return "\n".join(found) if found else "what is built is what the policy says"
