"""``dataclass`` that is made when it is first needed: of a hundred, a command needs thirty.

To make one takes the compiler 0.4 ms. From its first instance on, or when somebody asks for its fields, a
class is what the standard library makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - for type checkers it is the same
else:
    import dataclasses
    import threading

    _FIELDS = "__dataclass_fields__"
    # Making one may need another one.
    _LOCK = threading.RLock()
    _pending: dict[type, dict[str, Any]] = {}
    _made: set[type] = set()

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """Do what ``dataclasses.dataclass`` does, later."""
        return _deferred(cls, options) if cls is not None else lambda found: _deferred(found, options)

    def _deferred(cls: type, options: dict[str, Any]) -> type:
        # With slots it is another class; whoever makes instances in a way of their own goes on doing so.
        if options.get("slots") or cls.__new__ not in (object.__new__, _new):
            return dataclasses.dataclass(cls, **options)
        # Not in __init__: while a thread makes the class, instances of another one have to wait here.
        cls.__new__ = _new
        setattr(cls, _FIELDS, _Fields())
        _pending[cls] = options
        return cls

    def _new(kind: type, *_: Any, **__: Any) -> Any:
        if kind not in _made:
            _make(kind)
        return object.__new__(kind)

    class _Fields:
        """Stands for the fields until somebody looks: a dataclass derived from this one, or ``fields``."""

        def __get__(self, instance: object, owner: type) -> Any:
            _make(owner)
            return getattr(owner, _FIELDS)

    def _make(kind: type) -> None:
        """Make a class and those it stands on, whichever still wait for it."""
        with _LOCK:
            for cls in reversed(kind.__mro__):
                options = _pending.pop(cls, None)
                if options is not None:
                    dataclasses.dataclass(cls, **options)
            _made.add(kind)
