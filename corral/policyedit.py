"""``corral allow --save``, ``corral deny --save``: a name comes or goes, nothing else of the file changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from policy.declaration import Declaration, Name
from policy.edit import EditError, add_entry, entry, remove_entries
from policy.errors import CorralError, PolicyError
from policy.loader import LoadedPolicy
from policy.revision import REACH, Grant, revision

Reach = dict[str, frozenset[int]]


def reach(declaration: Declaration) -> Reach:
    """Return name -> ports."""
    return {name.host: frozenset(name.ports) for name in declaration.names}


def save(
    loaded: LoadedPolicy,
    host: str,
    ports: tuple[int, ...],
    load: Callable[[Path], LoadedPolicy],
    *,
    force: bool = False,
    saved: Callable[[LoadedPolicy, LoadedPolicy], None] = lambda _before, _after: None,
) -> LoadedPolicy:
    """Write ``host`` on ``ports`` into the policy file and return the policy it makes.

    Its text is read, changed and loaded again before it takes the file's place; what it says must be the
    policy before and this name, and nothing else.

    Args:
        loaded: the policy as the command found it.
        host: canonical name.
        ports: to be reachable.
        load: reads a policy file of the same project.
        force: see ``egress.allow``.
        saved: called with the policy before and the one that was written, once it is. Where revisions are
            approved, the new one counts as such if the old one did: the user asked for exactly this.

    Raises:
        PolicyError: the file changed meanwhile, or is written in a way that is not edited.
    """
    old = reach(loaded.declaration).get(host, frozenset())
    missing = tuple(port for port in ports if port not in old)
    if not missing:
        return loaded
    written = next((one for one in loaded.policy.egress.allow if one.host == host), None)
    wishes = {} if written is None else {"optional": written.optional, "liveness": written.liveness}
    new = entry(
        Name(host=host, ports=missing, **wishes), force=force or (written is not None and written.force)
    )
    by_hand = f"add it to egress.allow in {loaded.path} yourself: - {new}"
    expected = {**reach(loaded.declaration), host: old | frozenset(ports)}
    return _write(loaded, lambda text: add_entry(text, new), expected, load, by_hand, saved)


def unsave(
    loaded: LoadedPolicy,
    host: str,
    load: Callable[[Path], LoadedPolicy],
    *,
    saved: Callable[[LoadedPolicy, LoadedPolicy], None] = lambda _before, _after: None,
) -> LoadedPolicy:
    """Take ``host`` out of the policy file and return the policy it makes; see ``save``.

    Raises:
        PolicyError: the file changed meanwhile, is written in a way that is not edited, or the name comes
            from elsewhere.
    """
    old = reach(loaded.declaration)
    if host not in old:
        return loaded
    if not any(one.host == host for one in loaded.policy.egress.allow):
        raise PolicyError(
            f"{host} is no entry of egress.allow in {loaded.path}",
            "when it is one of the profile's own: egress.profile_defaults: false; when it comes from this "
            "host's configuration: egress.from_host",
        )
    expected = {name: ports for name, ports in old.items() if name != host}
    by_hand = f"take it out of egress.allow in {loaded.path} yourself"
    return _write(loaded, lambda text: remove_entries(text, host), expected, load, by_hand, saved)


def _write(
    loaded: LoadedPolicy,
    edit: Callable[[str], str],
    expected: Reach,
    load: Callable[[Path], LoadedPolicy],
    by_hand: str,
    saved: Callable[[LoadedPolicy, LoadedPolicy], None],
) -> LoadedPolicy:
    path = Path(os.path.realpath(loaded.path))
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != loaded.sha256:
            raise PolicyError(f"{loaded.path} changed while it was being edited", "look at it and try again")
        text = edit(raw.decode("utf-8"))
        partial = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with partial.open("xb") as stream:
                os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
            made = load(partial)
            _check(loaded, made, text, expected)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (EditError, UnicodeDecodeError) as error:
        raise PolicyError(f"{loaded.path} cannot be edited: {error}", by_hand) from error
    except OSError as error:
        raise CorralError(f"cannot write {loaded.path}: {error.strerror}", by_hand) from error
    # What was read and checked, not what the file says by now: an agent writes here too.
    made = replace(made, path=loaded.path)
    saved(loaded, made)
    return made


def _check(before: LoadedPolicy, after: LoadedPolicy, text: str, expected: Reach) -> None:
    same = {"egress": None}
    if (
        reach(after.declaration) != expected
        or after.policy.model_copy(update=same) != before.policy.model_copy(update=same)
        or hashlib.sha256(text.encode()).hexdigest() != after.sha256
        or _beside(before) != _beside(after)
    ):
        raise EditError("it would not say what it should")


def _beside(loaded: LoadedPolicy) -> tuple[frozenset[Grant], object, object]:
    """Return what a policy allows beside names."""
    found = revision(loaded)
    settings = {key: value for key, value in found.settings.items() if not key.startswith("egress.allow.")}
    return frozenset(grant for grant in found.grants if grant[0] != REACH), found.amounts, settings
