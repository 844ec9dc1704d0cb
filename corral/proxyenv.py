"""What the programs of a proxied session are told of their proxy. Pure."""

from __future__ import annotations

from policy import proxying
from policy.container import HOST_ALIAS
from policy.declaration import Declaration
from policy.patterns import Pattern, Regex, Zone, parse_pattern

URL = f"http://{proxying.ALIAS}:{proxying.PORT}"
# Programs read one case or the other, and few read both.
PROXIES = tuple(
    name for upper in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY") for name in (upper, upper.lower())
)
PAST = ("NO_PROXY", "no_proxy")
# Node looks at the variables above only when this one says so.
NODE = "NODE_USE_ENV_PROXY"
# Never asked of the proxy: it reaches none of them.
LOCAL = ("localhost", "127.0.0.1", "::1", HOST_ALIAS, proxying.ALIAS)
NAMES = frozenset({*PROXIES, *PAST, NODE})


def variables(declaration: Declaration) -> dict[str, str]:
    """Return the variables that lead a session's programs to its proxy; none when it has no proxy."""
    if not declaration.proxied:
        return {}
    past = ",".join((*LOCAL, *direct(declaration)))
    return {**dict.fromkeys(PROXIES, URL), **dict.fromkeys(PAST, past), NODE: "1"}


def direct(declaration: Declaration) -> list[str]:
    """Return the pinned names that programs reach without the proxy, in the policy's order.

    To many programs a name in NO_PROXY means all names below it, too. So one below which a pattern has, or
    may have, names is left out: the proxy passes it as well.
    """
    tops = [_top(parse_pattern(pattern.host, force=True)) for pattern in declaration.patterns]
    return [name.host for name in declaration.names if not any(_related(name.host, top) for top in tops)]


def _top(pattern: Pattern) -> str:
    """Return the domain that all a pattern matches lies below; nothing for one name."""
    if isinstance(pattern, Zone):
        return pattern.suffix
    return pattern.tail if isinstance(pattern, Regex) else ""


def _related(name: str, top: str) -> bool:
    """Say whether there may be a name below both."""
    return bool(top) and (name == top or name.endswith(f".{top}") or top.endswith(f".{name}"))
