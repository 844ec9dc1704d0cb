"""Adding a name to the text of a corral.yaml, or taking one out, with comments and the order kept. Pure.

The text is changed in one place and nowhere else; whoever calls this loads the result and compares, because a
YAML document can be written in more ways than are foreseen here.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from policy.declaration import Name
from policy.hosts import HostError
from policy.patterns import parse_pattern

DEFAULT_PORTS = (443,)


class EditError(ValueError):
    """The text is written in a way that is not changed by a program."""


def entry(name: Name, *, force: bool = False) -> str:
    """Return the shortest allowlist entry that means ``name``."""
    fields = [f"host: {name.host}"]
    if name.ports != DEFAULT_PORTS:
        fields.append(f"ports: [{', '.join(map(str, name.ports))}]")
    fields += ["optional: true"] * name.optional + ["liveness: false"] * (not name.liveness)
    fields += ["force: true"] * force
    return name.host if len(fields) == 1 else "{" + ", ".join(fields) + "}"


def add_entry(text: str, new: str) -> str:
    """Return ``text`` with one more entry at the end of ``egress.allow``.

    Raises:
        EditError: there is no such place that can be found.
    """
    root = _root(text)
    editor = _Editor(text, "\r\n" if "\r\n" in text else "\n")
    key, egress = _child(root, "egress")
    if key is None:
        return editor.append_key(
            root, f"egress:{editor.newline}  allow:{editor.newline}    - {new}", f"egress: {{allow: [{new}]}}"
        )
    if _is_empty(egress):
        return editor.under(key, [f"{' ' * 2}allow:", f"{' ' * 4}- {new}"])
    if not isinstance(egress, MappingNode):
        raise EditError("egress is not a mapping")
    key, allow = _child(egress, "allow")
    if key is None:
        indent = " " * (egress.value[0][0].start_mark.column if egress.value else 0)
        return editor.append_key(
            egress, f"{indent}allow:{editor.newline}{indent}  - {new}", f"allow: [{new}]"
        )
    if _is_empty(allow):
        if egress.flow_style:
            raise EditError("egress.allow has no value")
        return editor.under(key, [f"{' ' * (key.start_mark.column + 2)}- {new}"])
    if not isinstance(allow, SequenceNode):
        raise EditError("egress.allow is not a list")
    return editor.append_item(allow, new)


def remove_entries(text: str, host: str) -> str:
    """Return ``text`` without the entries of ``egress.allow`` that are ``host``, a name's or pattern's text.

    Comments on lines of their own stay; one behind an entry goes with it.

    Raises:
        EditError: there is none, or it is written in a way that is not edited.
    """
    _, egress = _child(_root(text), "egress")
    _, allow = _child(egress, "allow") if isinstance(egress, MappingNode) else (None, None)
    if not isinstance(allow, SequenceNode):
        raise EditError("egress.allow is not a list")
    gone = [index for index, item in enumerate(allow.value) if _names(item, host)]
    if not gone:
        raise EditError(f"egress.allow has no entry {host}")
    editor = _Editor(text, "")
    everything = len(gone) == len(allow.value)
    cut = editor.flow_cut if allow.flow_style else editor.block_cut
    cuts = [cut(allow, index) for index in gone]
    if everything and allow.flow_style:
        cuts = [(allow.start_mark.index + 1, allow.end_mark.index - 1)]
    if any("#" in text[start:end] and allow.flow_style for start, end in cuts):
        raise EditError("there are comments inside the list")
    upper = len(text)
    for start, end in reversed(cuts):
        # Two at the end share what is between them.
        text = text[:start] + text[min(end, upper) :]
        upper = start
    if everything and not allow.flow_style:
        key, _ = _child(egress, "allow")
        # Up here nothing was cut.
        colon = text.index(":", key.end_mark.index) + 1
        text = text[:colon] + " []" + text[colon:]
    return text


def _root(text: str) -> MappingNode:
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise EditError("it is not YAML") from error
    if not isinstance(root, MappingNode):
        raise EditError("it is not a mapping")
    return root


def _names(item: Any, host: str) -> bool:
    node = _child(item, "host")[1] if isinstance(item, MappingNode) else item
    try:
        return isinstance(node, ScalarNode) and parse_pattern(str(node.value), force=True).text == host
    except HostError:
        return False


def _child(node: MappingNode, name: str) -> tuple[Any, Any]:
    for key, value in node.value:
        if isinstance(key, ScalarNode) and key.value == name:
            return key, value
    return None, None


def _is_empty(node: Any) -> bool:
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index


def _end(node: Any) -> int:
    """Return where the last character of a node is that is not space or comment."""
    if isinstance(node, ScalarNode) or node.flow_style:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)


class _Editor:
    def __init__(self, text: str, newline: str) -> None:
        self.text = text
        self.newline = newline

    def insert(self, at: int, what: str) -> str:
        return self.text[:at] + what + self.text[at:]

    def line_end(self, at: int) -> int:
        """Return the end of the line, before its line break."""
        found = self.text.find("\n", at)
        end = len(self.text) if found < 0 else found
        return end - 1 if self.text[at:end].endswith("\r") else end

    def under(self, key: Any, lines: list[str]) -> str:
        """Put lines below a key without a value."""
        at = self.line_end(key.end_mark.index)
        return self.insert(at, "".join(self.newline + line for line in lines))

    def append_key(self, node: MappingNode, block: str, flow: str) -> str:
        if node.flow_style:
            return self.append_flow(node, flow)
        return self.insert(self.line_end(_end(node)), self.newline + block)

    def append_item(self, node: SequenceNode, item: str) -> str:
        if node.flow_style:
            return self.append_flow(node, item)
        start = node.value[-1].start_mark.index
        line = self.text.rfind("\n", 0, start) + 1
        dash = self.text.rfind("-", line, start)
        if dash < 0 or self.text[line:dash].strip():
            raise EditError("the last entry of egress.allow is not on a line with its dash")
        return self.insert(self.line_end(_end(node)), f"{self.newline}{self.text[line:dash]}- {item}")

    def block_cut(self, node: SequenceNode, index: int) -> tuple[int, int]:
        """Return the lines of an entry with its dash, as offsets."""
        item = node.value[index]
        start = item.start_mark.index
        line = self.text.rfind("\n", 0, start) + 1
        end = self.line_end(_end(item))
        after = self.text.find("\n", end)
        lead = self.text[line:start].strip()
        if lead != "-" or self.text[_end(item) : end].split("#")[0].strip():
            raise EditError("an entry of egress.allow is not on lines of its own")
        if after < 0 and line:
            # The last line has no end: the one before it loses its own.
            return line - (2 if self.text[:line].endswith("\r\n") else 1), len(self.text)
        return line, len(self.text) if after < 0 else after + 1

    def flow_cut(self, node: SequenceNode, index: int) -> tuple[int, int]:
        """Return an entry of ``[...]`` and the comma that goes with it, as offsets."""
        if index + 1 < len(node.value):
            return node.value[index].start_mark.index, node.value[index + 1].start_mark.index
        start = _end(node.value[index - 1]) if index else node.value[index].start_mark.index
        return start, _end(node.value[index])

    def append_flow(self, node: Any, item: str) -> str:
        if not node.value:
            return self.insert(node.start_mark.index + 1, item)
        last = node.value[-1]
        return self.insert(_end(last[1] if isinstance(node, MappingNode) else last), f", {item}")
