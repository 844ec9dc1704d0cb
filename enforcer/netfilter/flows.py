"""Deleting conntrack entries of what is withdrawn."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterable
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from enforcer.netfilter.model import PROTOCOLS, Element


def forget(elements: Iterable[Element]) -> None:
    """Delete the conntrack entries of withdrawn elements.

    Raises:
        NetlinkError, OSError: the kernel refuses.
    """
    gone = {(e.src, PROTOCOLS[e.proto], e.port, e.dst) for e in elements}
    if not gone:
        return
    with contextlib.closing(NFCTSocket()) as conntrack:
        try:
            for key in sorted(gone):
                _delete_flows(conntrack, key)
        except NetlinkError as error:
            if error.code != errno.EINVAL:
                raise
            # Before Linux 6.8 the kernel deletes by complete tuples only.
            _delete_one_by_one(conntrack, gone)


def forget_sources(sources: Iterable[str]) -> None:
    """Delete the conntrack entries of all flows that these sources opened.

    Raises:
        NetlinkError, OSError: the kernel refuses.
    """
    gone = sorted(set(sources))
    if not gone:
        return
    with contextlib.closing(NFCTSocket()) as conntrack:
        for source in gone:
            for flow in list(conntrack.dump(tuple_orig=NFCTAttrTuple(saddr=source))):
                original = _tuple(flow)
                # Whether the kernel has picked the flows is its version's business.
                if original is not None and original.saddr == source:
                    # A flow that ended by itself in between is as good as deleted.
                    with contextlib.suppress(NetlinkError):
                        conntrack.entry("del", tuple_orig=original)


def _delete_flows(conntrack: NFCTSocket, key: tuple[str, int, int, str]) -> None:
    source, proto, port, destination = key
    flows = NFCTAttrTuple(saddr=source, daddr=destination, proto=proto, dport=port)
    flows.attrs()  # fills in the flags
    only = {"attrs": [["CTA_FILTER_ORIG_FLAGS", flows.flags]]}
    conntrack.entry("del", tuple_orig=flows, cta_filter=only)


def _delete_one_by_one(conntrack: NFCTSocket, gone: Collection[tuple[str, int, int, str]]) -> None:
    # The kernel picks the flows of one source, few against the whole table, before they are parsed.
    for source in sorted({key[0] for key in gone}):
        for flow in list(conntrack.dump(tuple_orig=NFCTAttrTuple(saddr=source))):
            original = _tuple(flow)
            if original is not None and _key(original) in gone:
                # A flow that ended by itself in between is as good as deleted.
                with contextlib.suppress(NetlinkError):
                    conntrack.entry("del", tuple_orig=original)


def _key(flow: NFCTAttrTuple) -> tuple[str, int, int, str]:
    return (flow.saddr, flow.proto, flow.dport, flow.daddr)


def _tuple(flow: Any) -> NFCTAttrTuple | None:
    original = flow.get_attr("CTA_TUPLE_ORIG")
    addresses, protocol = original.get_attr("CTA_TUPLE_IP"), original.get_attr("CTA_TUPLE_PROTO")
    number = protocol.get_attr("CTA_PROTO_NUM")
    if number not in PROTOCOLS.values():
        return None
    return NFCTAttrTuple(
        saddr=addresses.get_attr("CTA_IP_V4_SRC"),
        daddr=addresses.get_attr("CTA_IP_V4_DST"),
        proto=number,
        sport=protocol.get_attr("CTA_PROTO_SRC_PORT"),
        dport=protocol.get_attr("CTA_PROTO_DST_PORT"),
    )
