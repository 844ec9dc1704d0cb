"""Git's index, as far as it names repositories inside of a working tree. Pure.

Of each, ``git status`` of the outer one starts another Git, which obeys that repository's configuration.
"""

from __future__ import annotations

import struct

_HEAD = struct.Struct(">4sII")
_NUMBER = struct.Struct(">I")
_FLAGS = struct.Struct(">H")
VERSIONS = (2, 3, 4)
# Lengths of an object's name: SHA-1, SHA-256.
HASHES = (20, 32)
# What stands before the object's name, and where in it the mode is.
_STATUS, _MODE = 40, 24
_TYPE, _GITLINK = 0o170000, 0o160000
_LENGTH, _EXTENDED = 0x0FFF, 0x4000


def gitlinks(data: bytes, size: int = HASHES[0]) -> list[bytes]:
    """Return the paths of repositories in a working tree, relative to it; one that is empty has another's.

    Args:
        data: the whole file.
        size: bytes of an object's name.

    Raises:
        ValueError: it is no index, or none that is understood.
    """
    try:
        magic, version, count = _HEAD.unpack_from(data)
        if magic != b"DIRC" or version not in VERSIONS:
            raise ValueError("not an index")
        return _compressed(data, size, count) if version == VERSIONS[-1] else _plain(data, size, count)
    except struct.error as error:
        raise ValueError("an index that ends early") from error


def _plain(data: bytes, size: int, count: int) -> list[bytes]:
    found, at = [], _HEAD.size
    for _ in range(count):
        (flags,) = _FLAGS.unpack_from(data, at + _STATUS + size)
        name = at + _STATUS + size + (4 if flags & _EXTENDED else 2)
        length = flags & _LENGTH
        if length == _LENGTH:
            length = data.find(b"\0", name) - name
            if length < 0:
                raise ValueError("a name without an end")
        if _is_link(data, at):
            found.append(data[name : name + length])
        # At least one byte of filling, up to a multiple of eight.
        at += (name - at + length + 8) & ~7
    return found


def _compressed(data: bytes, size: int, count: int) -> list[bytes]:
    found, at, last = [], _HEAD.size, b""
    for _ in range(count):
        (flags,) = _FLAGS.unpack_from(data, at + _STATUS + size)
        place = at + _STATUS + size + (4 if flags & _EXTENDED else 2)
        strip, place = _varint(data, place)
        end = data.find(b"\0", place)
        if end < 0 or strip > len(last):
            raise ValueError("a name without an end")
        last = last[: len(last) - strip] + data[place:end]
        if _is_link(data, at):
            found.append(last)
        at = end + 1
    return found


def _is_link(data: bytes, at: int) -> bool:
    return bool((_NUMBER.unpack_from(data, at + _MODE)[0] & _TYPE) == _GITLINK)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for step, byte in enumerate(data[at : at + 8]):
        value = (value + 1 if step else 0) << 7 | byte & 0x7F
        if not byte & 0x80:
            return value, at + step + 1
    raise ValueError("a number without an end")
