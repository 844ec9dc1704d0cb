"""``corral allow --save``, ``corral deny --save``: an entry comes or goes, nothing else changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from policy import asking
from policy.declaration import Declaration
from policy.edit import EditError, add_entry, remove_entries
from policy.errors import CorralError, PolicyError
from policy.loader import LoadedPolicy
from policy.patterns import is_pattern
from policy.revision import REACH, Grant, revision
from policy.schema import DEFAULT_PORT, AllowEntry

Reach = dict[str, frozenset[int]]


def reach(declaration: Declaration) -> Reach:
    """Return name -> ports, of what is pinned."""
    return {name.host: frozenset(name.ports) for name in declaration.names}


def _listed(declaration: Declaration) -> Reach:
    """Return entry -> ports, of all that is pinned or may be asked for."""
    found = reach(declaration)
    for pattern in declaration.patterns:
        found[pattern.host] = found.get(pattern.host, frozenset()) | frozenset(pattern.ports)
    return found


def written(entry: AllowEntry) -> str:
    """Return an entry as it is written in a list, in its shortest form."""
    host = f"'{entry.host}'" if is_pattern(entry.host) else entry.host
    fields = [f"host: {host}"]
    if entry.ports != (DEFAULT_PORT,):
        fields.append(f"ports: [{', '.join(map(str, entry.ports))}]")
    fields += ["optional: true"] * entry.optional + ["liveness: false"] * (not entry.liveness)
    fields += ["protocol: tcp"] * (entry.protocol == "tcp") + ["sni: false"] * (not entry.sni)
    fields += ["force: true"] * entry.force
    return host if len(fields) == 1 else "{" + ", ".join(fields) + "}"


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
        host: canonical name, or a pattern's text.
        ports: to be reachable.
        load: reads a policy file of the same project.
        force: see ``egress.allow``.
        saved: called with the policy before and the one that was written, once it is. Where revisions are
            approved, the new one counts as such if the old one did: the user asked for exactly this.

    Raises:
        PolicyError: the file changed meanwhile, or is written in a way that is not edited.
    """
    old = _listed(loaded.declaration).get(host, frozenset())
    missing = tuple(port for port in ports if port not in old)
    if not missing:
        return loaded
    allow = loaded.policy.egress.allow
    # Of two entries for one name the strict wish wins: with others, this one would undo those.
    like = next((one for one in allow if one.host == host), AllowEntry(force=force, host=host))
    new = like.model_copy(update={"ports": missing, "force": force or like.force})
    by_hand = f"add it to egress.allow in {loaded.path} yourself: - {written(new)}"
    return _write(loaded, lambda text: add_entry(text, written(new)), (*allow, new), load, by_hand, saved)


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
    allow = loaded.policy.egress.allow
    if host not in _listed(loaded.declaration):
        _refuse_part(loaded, host)
        return loaded
    if not any(one.host == host for one in allow):
        raise PolicyError(
            f"{host} is no entry of egress.allow in {loaded.path}",
            "when it is one of the profile's own: egress.profile_defaults: false; when it comes from this "
            "host's configuration: egress.from_host",
        )
    left = tuple(one for one in allow if one.host != host)
    by_hand = f"take it out of egress.allow in {loaded.path} yourself"
    return _write(loaded, lambda text: remove_entries(text, host), left, load, by_hand, saved)


def _refuse_part(loaded: LoadedPolicy, host: str) -> None:
    entries = [] if is_pattern(host) else asking.matching(loaded.declaration.patterns, host)
    if entries:
        raise PolicyError(
            f"{host} is allowed by {entries[0].host} in {loaded.path}, of which no part can be taken out",
            f"corral deny '{entries[0].host}' --save, and allow the names that are needed",
        )


def _write(
    loaded: LoadedPolicy,
    edit: Callable[[str], str],
    allow: tuple[AllowEntry, ...],
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
            try:
                made = load(partial)
            except PolicyError as error:
                why = error.message.replace(str(partial), str(path))
                raise PolicyError(
                    f"{loaded.path} stays as it is; it would be refused: {why}", by_hand
                ) from error
            _check(loaded, made, text, allow)
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


def _check(before: LoadedPolicy, after: LoadedPolicy, text: str, allow: tuple[AllowEntry, ...]) -> None:
    egress = before.policy.egress.model_copy(update={"allow": allow})
    if (
        after.policy != before.policy.model_copy(update={"egress": egress})
        or after.from_host != before.from_host
        or hashlib.sha256(text.encode()).hexdigest() != after.sha256
        or _beside(before) != _beside(after)
    ):
        raise EditError("it would not say what it should")


def _beside(loaded: LoadedPolicy) -> tuple[frozenset[Grant], object, object]:
    """Return what a policy allows beside names."""
    found = revision(loaded)
    settings = {key: value for key, value in found.settings.items() if not key.startswith("egress.allow.")}
    return frozenset(grant for grant in found.grants if grant[0] != REACH), found.amounts, settings
