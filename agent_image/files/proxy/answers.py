"""What the proxy says to a client: fixed lines, in which nothing of the request is repeated. Pure."""

from __future__ import annotations

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    408: "Request Timeout",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
LINES = {
    400: "400 malformed: what is asked for must be CONNECT name:port, with a domain name and no address",
    403: "403 denied: the policy of this sandbox does not allow this name on this port; see: corral denied",
    405: "405 only CONNECT is served: this proxy carries TLS to allowed names; use https, not http",
    408: "408 the request did not come within 10 s",
    502: "502 unreachable: none of the name's addresses accepted a connection",
    503: "503 busy: too much at once, or the service that decides does not answer; try again",
    504: "504 unresolved: the name could not be resolved to a public address",
}
# What the enforcer says of a name it does not open (docs/decisions/060-*).
KINDS = {"malformed": 400, "denied": 403, "resolve": 504, "busy": 503, "unready": 503}


def render(status: int, ident: str) -> bytes:
    """Return the whole answer to the request ``ident``; the connection ends with it."""
    body = f"{LINES[status]} (request {ident})\n"
    allow = "Allow: CONNECT\r\n" if status == 405 else ""
    return (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: text/plain; charset=us-ascii\r\n"
        f"Content-Length: {len(body)}\r\n{allow}Connection: close\r\n\r\n{body}"
    ).encode("ascii")
