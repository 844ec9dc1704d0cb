"""Completion of the command line in bash, zsh and fish: what a word could become, and the scripts that ask.

Asked by a key, so nothing here waits for Docker or the host service, and nothing fails: what cannot be found
out is not offered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHELLS = ("bash", "zsh", "fish")
# What a shell can be given without quoting it.
SAFE = re.compile(r"[A-Za-z0-9@%+=:,./_-]{1,253}")
_ALL = "*"
# What an argument or an option means: (command, parameter) -> kind.
KINDS: Mapping[tuple[str, str], str] = {
    ("attach", "session"): "session",
    ("logs", "session"): "session",
    ("inspect", "session"): "session",
    ("down", "sandbox"): "sandbox",
    ("refresh", "names"): "host",
    ("deny", "host"): "host",
    ("policy check", "target"): "host",
    ("verify", "explain"): "check",
    ("init", "profile"): "profile",
    ("completion", "shell"): "shell",
    (_ALL, "sandbox"): "sandbox",
    (_ALL, "resume"): "session",
}

# The scripts run what the PATH names, never the word that is typed: an agent may have left a program called
# corral in the project, and a key is no wish to run it.
BASH = """\
# corral completion bash
_corral_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(corral complete bash "$COMP_CWORD" -- "${COMP_WORDS[@]}" 2>/dev/null))
}
complete -o default -F _corral_complete corral
"""
ZSH = """\
#compdef corral
_corral() {
    local -a found
    found=("${(@f)$(corral complete zsh $((CURRENT - 1)) -- "${words[@]}" 2>/dev/null)}")
    if [[ -n ${found[1]} ]]; then
        _describe corral found
    else
        _files
    fi
}
if [[ ${funcstack[1]} = _corral ]]; then
    _corral "$@"
else
    compdef _corral corral
fi
"""
FISH = """\
# corral completion fish
function __corral_complete
    set -l words (commandline --tokenize --current-process --cut-at-cursor) (commandline --current-token)
    corral complete fish (math (count $words) - 1) -- $words 2>/dev/null
end
complete --command corral --no-files --arguments '(__corral_complete)'
complete --command corral --condition 'contains -- -- (commandline -opc)' --force-files
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

Lookup = Callable[[str], Iterable[str]]


@dataclass(frozen=True)
class Candidate:
    """What a word could become, and what that is."""

    text: str
    about: str = ""


def candidates(root: Any, words: Sequence[str], lookup: Lookup) -> list[Candidate]:
    """Return what the last word could become.

    Args:
        root: what typer.main.get_command returns. Its classes are Click's, or typer's copy of them.
        words: the command line up to the cursor, the program first, the word that is completed last.
        lookup: returns what there is of a kind; see ``KINDS``.
    """
    if len(words) < 2:
        return []
    *before, current = [word for word in words[1:] if word != "="]
    command, path, given = root, [], 0
    awaited = None
    for word in before:
        if word == "--":
            # From here on it is somebody else's command line.
            return []
        if awaited is not None:
            awaited = None
        elif word.startswith("-") and word != "-":
            awaited = _option(command, word)
        elif _commands(command):
            below = _commands(command).get(word)
            if below is None:
                return []
            command, given = below, 0
            path.append(word)
        else:
            given += 1
    name = " ".join(path)
    if awaited is not None:
        found = [Candidate(text) for text in lookup(_kind(name, awaited))]
    elif current.startswith("-"):
        found = _options(command) + _values(command, current, name, lookup)
    elif _commands(command):
        found = [
            Candidate(word, _first_line(below.help))
            for word, below in sorted(_commands(command).items())
            if not below.hidden
        ]
    else:
        found = [Candidate(text) for text in lookup(_kind(name, _argument(command, given)))]
    return [one for one in found if one.text.startswith(current) and SAFE.fullmatch(one.text)]


def _commands(command: Any) -> Mapping[str, Any]:
    return dict(getattr(command, "commands", None) or {})


def _option(command: Any, word: str) -> Any | None:
    """Return the option that a word is when its value comes next."""
    for parameter in command.params:
        if word in parameter.opts and getattr(parameter, "param_type_name", "") == "option":
            flag = getattr(parameter, "is_flag", False) or getattr(parameter, "count", False)
            return None if flag else parameter
    return None


def _values(command: Any, word: str, name: str, lookup: Lookup) -> list[Candidate]:
    """Return what follows the sign of an option that is one word with its value, as zsh and fish give it."""
    option, equals, _ = word.partition("=")
    meant = _option(command, option) if equals else None
    return [] if meant is None else [Candidate(f"{option}={text}") for text in lookup(_kind(name, meant))]


def _options(command: Any) -> list[Candidate]:
    found = [
        Candidate(word, _first_line(getattr(parameter, "help", "")))
        for parameter in command.params
        if getattr(parameter, "param_type_name", "") == "option" and not getattr(parameter, "hidden", False)
        for word in parameter.opts
    ]
    return [*sorted(found, key=lambda one: one.text), Candidate("--help", "Show this message and exit.")]


def _argument(command: Any, given: int) -> Any | None:
    """Return the argument that the word after ``given`` others is."""
    arguments = [one for one in command.params if getattr(one, "param_type_name", "") == "argument"]
    for position, argument in enumerate(arguments):
        if position == given or argument.nargs == -1:
            return argument
    return None


def _kind(command: str, parameter: Any | None) -> str:
    name = "" if parameter is None else str(parameter.name)
    return KINDS.get((command, name)) or KINDS.get((_ALL, name)) or ""


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def told(found: Iterable[Candidate], shell: str) -> str:
    """Return candidates as a shell's script wants them, a line each."""
    lines = []
    for one in found:
        about = " ".join(one.about.split())
        if shell == "zsh":
            text = one.text.replace(":", "\\:")
            lines.append(f"{text}:{about}" if about else text)
        elif shell == "fish":
            lines.append(f"{one.text}\t{about}" if about else one.text)
        else:
            lines.append(one.text)
    return "\n".join(lines)
