"""The build context of an agent's image: which files it has, and how they get onto disk.

::

    Dockerfile
    certificates/corral-<hash>.crt      one certificate per file, as update-ca-certificates wants it
    root/...                            what ``COPY root/ /`` puts into the image, root-owned

The directory is generated and disposable: it is replaced as a whole, and only when something in it differs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent_image.archive import executable
from agent_image.dockerfile import CHECKER, render
from agent_image.spec import ImageSpec
from policy.container import ENTRYPOINT
from policy.errors import CorralError, PolicyError

LABEL_INPUTS = "io.corral.inputs"
DIRECTORY_MODE = 0o755

# glibc returns only the first address of a name in /etc/hosts without it.
HOST_CONF = b"multi on\n"

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_PEM = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)


@dataclass(frozen=True)
class ContextFile:
    """One file of the context; ``path`` is relative to it."""

    path: str
    content: bytes
    mode: int = 0o644


def files(spec: ImageSpec) -> tuple[ContextFile, ...]:
    """Return every file of the context, sorted by path.

    Raises:
        PolicyError: a CA certificate is not one, or two files want the same place.
    """
    found = [ContextFile("Dockerfile", render(spec).encode())]
    for pem in certificates(spec.ca_certificates):
        name = hashlib.sha256(pem).hexdigest()[:16]
        found.append(ContextFile(f"certificates/corral-{name}.crt", pem))
    baked = {
        ENTRYPOINT: (executable("entrypoint"), 0o755),
        CHECKER: (executable("verify"), 0o755),
        "/etc/host.conf": (HOST_CONF, 0o644),
    }
    if spec.pip_index:
        baked["/etc/pip.conf"] = (f"[global]\nindex-url = {spec.pip_index}\n".encode(), 0o644)
    for file in spec.baked_files:
        if file.path in baked:
            raise PolicyError(f"{file.path} is corral's own file in the image", "bake it to another path")
        baked[file.path] = (file.content.encode(), file.mode)
    found += [ContextFile(f"root{path}", content, mode) for path, (content, mode) in baked.items()]
    return tuple(sorted(found, key=lambda file: file.path))


def digest(spec: ImageSpec) -> str:
    """Return a hash over all inputs: an image that carries it (LABEL_INPUTS) need not be built again."""
    total = hashlib.sha256()
    for file in files(spec):
        head = f"{file.path}\0{file.mode:o}\0{len(file.content)}\0"
        total.update(head.encode() + file.content)
    return "sha256:" + total.hexdigest()


def write_context(spec: ImageSpec, directory: Path) -> bool:
    """Make ``directory`` hold exactly the files of the context; say whether anything had to change.

    Raises:
        PolicyError: see ``files``.
        CorralError: the directory is not one that only this user could have written.
        OSError: the disk refuses.
    """
    wanted = files(spec)
    parent = directory.parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    existed = _is_ours(directory)
    if existed and _tree(directory) == _expected(wanted):
        return False
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=parent))
    try:
        _fill(fresh, wanted)
        if existed:
            discarded = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=parent))
            directory.rename(discarded)
            fresh.rename(directory)
            shutil.rmtree(discarded)
        else:
            fresh.rename(directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return True


def certificates(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Split PEM texts into single certificates, sorted, none twice.

    Raises:
        PolicyError: there is no certificate in a text, one cannot be decoded, or a private key is among them.
    """
    found: set[bytes] = set()
    for text in texts:
        decoded = text.decode("ascii", "replace")
        if "PRIVATE KEY-----" in decoded:
            raise PolicyError(
                "a file of CA certificates contains a private key, which must not get into an image",
                "give a file that holds certificates only",
            )
        blocks = _PEM.findall(decoded)
        if not blocks:
            raise PolicyError("a file of CA certificates holds no PEM certificate", "convert it to PEM")
        found.update(_canonical(block) for block in blocks)
    return tuple(sorted(found))


def _canonical(block: str) -> bytes:
    try:
        der = ssl.PEM_cert_to_DER_cert(block)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
    except (ValueError, ssl.SSLError) as error:
        raise PolicyError(f"a CA certificate cannot be decoded: {error}", "export it as PEM again") from error
    return ssl.DER_cert_to_PEM_cert(der).encode()


def _is_ours(directory: Path) -> bool:
    """Say whether the directory exists. The next image is built from it: nobody else may have a say in it."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        what = "is not a directory"
    elif found.st_uid != os.geteuid():
        what = f"belongs to uid {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = "can be written by others"
    else:
        return True
    raise CorralError(
        f"refusing to use the build directory {directory}: it {what}",
        f"look at it, then remove it: rm -r {directory}",
    )


def _expected(wanted: tuple[ContextFile, ...]) -> dict[str, tuple[int, bytes | None]]:
    tree: dict[str, tuple[int, bytes | None]] = {file.path: (file.mode, file.content) for file in wanted}
    for file in wanted:
        for parent in Path(file.path).parents:
            tree.setdefault(str(parent), (DIRECTORY_MODE, None))
    del tree["."]
    return tree


def _tree(directory: Path) -> dict[str, tuple[int, bytes | None]]:
    """Return path -> (mode, content or None for a directory) of what is on disk."""
    tree: dict[str, tuple[int, bytes | None]] = {}
    for path in directory.rglob("*"):
        found = path.lstat()
        regular, folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        content = path.read_bytes() if regular else None
        mode = stat.S_IMODE(found.st_mode) if regular or folder else -1
        tree[str(path.relative_to(directory))] = (mode, content)
    return tree


def _fill(directory: Path, wanted: tuple[ContextFile, ...]) -> None:
    for path, (mode, content) in sorted(_expected(wanted).items()):
        target = directory / path
        if content is None:
            target.mkdir()
        else:
            target.write_bytes(content)
        # Not left to the umask: COPY takes modes along, and the classic builder has no --chmod for it.
        target.chmod(mode)
    directory.chmod(DIRECTORY_MODE)
