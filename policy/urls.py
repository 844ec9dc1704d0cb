"""URLs of proxies and mirrors: which ones are fit to be used in a build, and how they are shown."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

# Narrower than RFC 3986: no quotes, '$', backslash or backtick, because these values end up in Dockerfiles
# and in configuration files.
_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!&()*+,;=%-]+")
_NO_PROXY = re.compile(r"[A-Za-z0-9._:/\[\]*, -]*")
MAX_URL = 2048


class UrlError(ValueError):
    """A URL is refused; the text never contains the URL."""


def split_http(url: str, *, credentials: bool) -> SplitResult:
    """Return the parts of an http or https URL.

    Args:
        url: the text as written.
        credentials: whether user and password may be in it.

    Raises:
        UrlError: another scheme (file:// above all), no host, a character that has no business in one,
            credentials where they would be stored in an image.
    """
    if len(url) > MAX_URL or not _CHARACTERS.fullmatch(url):
        raise UrlError("a character that does not belong in a URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlError("not a URL") from error
    if parts.scheme.lower() not in {"http", "https"}:
        raise UrlError("not an http:// or https:// URL")
    if not parts.hostname or port == 0:
        raise UrlError("a URL without a host or with port 0")
    if "@" in parts.netloc and not credentials:
        raise UrlError("a URL with credentials in it: they would be stored in the image")
    return parts


def redact(url: str) -> str:
    """Return ``url`` with user and password replaced, for display. Works on text that is not a URL too."""
    head, separator, rest = url.rpartition("@")
    if not separator:
        return url
    scheme, slashes, _ = head.partition("//")
    return f"{scheme}//***@{rest}" if slashes else f"***@{rest}"


def is_no_proxy(text: str) -> bool:
    """Say whether ``text`` is a list for no_proxy and nothing that a Dockerfile would read otherwise."""
    return len(text) <= MAX_URL and _NO_PROXY.fullmatch(text) is not None


def is_loopback(url: str) -> bool:
    """Say whether a URL points at the machine that reads it."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host in {"localhost", "::1"} or host.startswith("127.") or host.endswith(".localhost")
