"""The build context of an agent's image: which files it has, and how they get onto disk.

::

    Dockerfile
    certificates/corral-<hash>.crt      one certificate per file, as update-ca-certificates wants it
    requirements.txt                    Python packages of a harness with their hashes, when it has some
    prepare                             what makes an image that corral did not make fit
    root/...                            what ``COPY root/ /`` puts into the image, root-owned

The directory is generated and disposable: it is replaced as a whole, and only when something in it differs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import ssl
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agent_image.archive import executable
from agent_image.dockerfile import CHECKER, REQUIREMENTS, render
from agent_image.harnesses import wheels
from agent_image.spec import ImageSpec
from policy.container import ENTRYPOINT
from policy.errors import CorralError, PolicyError
from policy.problems import show
from policy.proxying import PROGRAM
from policy.records import dataclass

LABEL_INPUTS = "io.corral.inputs"
# The name it was built with: a later build takes that, and then nothing else would tell whose image it was.
LABEL_IMAGE = "io.corral.image"
DIRECTORY_MODE = 0o755

Manifest = dict[str, tuple[int, str]]
"""path -> (mode, SHA-256 of the content, empty for a directory)."""

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


# A build asks three times.
@functools.lru_cache(maxsize=4)
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
        PROGRAM: (executable("proxy"), 0o755),
        "/etc/host.conf": (HOST_CONF, 0o644),
    }
    if spec.pip_index:
        baked["/etc/pip.conf"] = (f"[global]\nindex-url = {spec.pip_index}\n".encode(), 0o644)
    for file in spec.baked_files:
        if file.path in baked:
            raise PolicyError(f"{file.path} is corral's own file in the image", "bake it to another path")
        baked[file.path] = (file.content.encode(), file.mode)
    libraries = wheels(spec.harness)
    if libraries is not None:
        found.append(ContextFile(REQUIREMENTS, libraries.requirements.encode()))
    if spec.foreign is not None:
        found.append(ContextFile("prepare", executable("prepare"), 0o755))
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


def differences(spec: ImageSpec, directory: Path) -> list[str]:
    """Return how what lies in ``directory`` differs from the context, a line each; writes nothing.

    Raises:
        PolicyError: see ``files``.
        CorralError: the directory is not one that only this user could have written.
    """
    if not _is_ours(directory):
        return [f"there is no {directory}"]
    return _changes(_hashed(_expected(files(spec))), _hashed(_tree(directory)))


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Let no other build of the same sandbox touch the directory and its seal meanwhile.

    Raises:
        OSError: the disk refuses.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_sealed(spec: ImageSpec, directory: Path) -> bool:
    """Do ``write_context``, unless something in the directory is not as it was written.

    It would be written anew anyway; but somebody wanted another image, and that is worth knowing.

    Raises:
        PolicyError: see ``files``.
        CorralError: see ``write_context``, and when something was changed: with what.
        OSError: the disk refuses.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = _hashed(_expected(files(spec)))
    there = _hashed(_tree(directory)) if _is_ours(directory) else None
    sealed = _read_seal(directory)
    if there is not None and sealed and there not in sealed:
        raise CorralError(
            "\n".join(
                [
                    f"the build directory {directory} was tampered with:",
                    *(f"  {line}" for line in _changes(sealed[-1], there)),
                ]
            ),
            f"find out by what, then remove it: rm -r {directory}",
        )
    # Cut off anywhere, what lies there is one of the two.
    if there != wanted:
        _write_seal(directory, [*([there] if there is not None else []), wanted])
    changed = write_context(spec, directory)
    if [wanted] != sealed:
        _write_seal(directory, [wanted])
    return changed


def _read_seal(directory: Path) -> list[Manifest]:
    try:
        body = json.loads(_seal_file(directory).read_text(encoding="utf-8"))
        return [{str(path): (int(mode), str(digest)) for path, (mode, digest) in row.items()} for row in body]
    except (OSError, ValueError, AttributeError, TypeError):
        # Nothing was sealed yet, and what lies there is replaced.
        return []


def _write_seal(directory: Path, manifests: Iterable[Manifest]) -> None:
    file = _seal_file(directory)
    partial = file.with_name(file.name + ".new")
    partial.write_text(json.dumps([dict(row) for row in manifests], sort_keys=True), encoding="utf-8")
    partial.replace(file)


def _seal_file(directory: Path) -> Path:
    return directory.with_name(directory.name + ".sealed")


def _hashed(tree: Mapping[str, tuple[int, bytes | None]]) -> Manifest:
    return {
        path: (mode, "" if content is None else hashlib.sha256(content).hexdigest())
        for path, (mode, content) in tree.items()
    }


def _changes(before: Manifest, after: Manifest) -> list[str]:
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old != new:
            what = "new" if old is None else "removed" if new is None else "changed"
            if old and new and old[1] == new[1]:
                what = f"mode {old[0]:o} -> {new[0]:o}" if new[0] >= 0 else "another kind of file"
            found.append(f"{what}: {show(path)}")
    return found


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
