"""Commands that read, each at a terminal of any width and in any environment, with something in every table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import Box, Lab

from .host import BASE_POLICY, Host, Project, until
from .person import at_terminal
from .reading import DENIED, NAME, READING, RUNNER, SAID, ZONE, Call, job

POLICY = f'keep: true\n{BASE_POLICY}    - {NAME}\n    - "*.{ZONE}"\n'
# Longer than the narrowest terminals are wide.
PROJECT = "reading-in-a-directory-whose-name-is-longer-than-forty-columns"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What goes on at the moment, written over.
GOING = re.compile(r"corral: [^\r\n\x1b]*\r\x1b\[K")
# Once past the proxy, once through it.
BEATEN = f"curl -s -m 2 --noproxy '*' http://{DENIED}/; curl -sk -m 2 https://nowhere.reads.corral.example/; "
# Name -> what reading.job is given.
WIDTHS: dict[str, dict[str, Any]] = {
    "one column": {"columns": 1, "COLUMNS": "1"},
    "forty columns": {"columns": 40, "COLUMNS": "40"},
    "two hundred columns": {"columns": 200, "COLUMNS": "200"},
}
COLOURLESS: dict[str, dict[str, Any]] = {
    "no colour": {"NO_COLOR": "1"},
    "no terminal type": {"unset": ("TERM",)},
    "nothing": {"only": ("PATH", "XDG_RUNTIME_DIR")},
}
OTHERS: dict[str, dict[str, Any]] = {
    "no home": {"unset": ("HOME",)},
    "another language": {"LANG": "tr_TR.UTF-8", "LC_ALL": ""},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@dataclass
class Scene:
    """A session that runs, one that ended and was kept, names that were refused, and a policy to be approved.

    ``piped``: what each call says without a terminal. ``values``: (words, in the changed project) -> what of that is
    the same each time.
    """

    host: Host
    project: Project
    changed: Project
    piped: list[tuple[Call, dict[str, Any]]] = field(default_factory=list)
    values: Mapping[tuple[str, bool], frozenset[str]] = field(default_factory=dict)

    def told(self, calls: list[Call], **how: Any) -> list[tuple[Call, dict[str, Any]]]:
        """Call each in such an environment; return what it said and ended with."""
        jobs = [
            job(
                call,
                (self.changed if call.changed else self.project).path,
                **{"TERM": "xterm-256color", **how},
            )
            for call in calls
        ]
        if "TERM" in how.get("unset", ()) or how.get("only"):
            jobs = [{**one, "set": {k: v for k, v in one["set"].items() if k != "TERM"}} for one in jobs]
        done = self.host.box.run(["python3", "-c", RUNNER], input=json.dumps(jobs), timeout=500)
        return list(zip(calls, json.loads(done.stdout.splitlines()[-1]), strict=True))


def every_call(*, slow: bool) -> list[Call]:
    return [call for calls in READING.values() for call in calls if slow or not call.slow]


def texts() -> list[Call]:
    """Those that make a text for people: JSON has no colours."""
    return [call for call in every_call(slow=False) if "--json" not in call.words]


def one_each() -> list[Call]:
    """One of each command: what the environment breaks, it breaks wherever something is read or printed."""
    return [calls[0] for calls in READING.values()]


def words_of(text: str) -> frozenset[str]:
    """Return what one would copy: names, ids, paths, addresses, options; plain words of a sentence are none."""
    words = {word.strip("\"',;()").rstrip(".") for word in COLOUR.sub("", text).split()}
    return frozenset(
        word for word in words if len(word) > 5 and word.isascii() and re.search(r"\d|[\w*][-./:_=]\w", word)
    )


@pytest.fixture(scope="module")
def scene(lab: Lab, installed: Box) -> Iterator[Scene]:
    host = Host(installed, lab.internet)
    host.wait_enforcer()
    lab.internet.set_name(NAME, ["203.0.113.10"])
    lab.internet.set_name(f"a.{ZONE}", ["203.0.113.11"])
    try:
        project = host.project(PROJECT, POLICY)
        script = f"{BEATEN} echo {SAID}; exit 3"
        done = project.corral("run", "--name", "kept", "--", "sh", "-c", script, check=False, timeout=500)
        assert done.returncode == 3, done.stderr
        project.corral("run", "--detach", "--name", "now", "--", "sh", "-c", f"{BEATEN} touch up; sleep 3000")
        until(lambda: project.exists("up"), 60, "the second session runs")
        until(lambda: DENIED in project.corral("denied").stdout, 30, "what was refused is known")
        changed = host.project("reading-changed")
        changed.policy(BASE_POLICY + "    - not-approved.reads.corral.example\n", approve=False)
        made = Scene(host, project, changed)
        calls = every_call(slow=True)
        first, second = made.told(calls), made.told(calls)
        for call, ended in first:
            assert ended["code"] in call.codes, (call, ended)
            for text in call.shows:
                assert text in ended["out"] + ended["err"], (call, text, ended)
        made.piped = first
        made.values = {
            (call.words, call.changed): words_of(one["out"] + " " + one["err"])
            & words_of(two["out"] + " " + two["err"])
            for (call, one), (_, two) in zip(first, second, strict=True)
        }
        yield made
    finally:
        host.end_projects()
        lab.internet.reset_names()


def sound(call: Call, ended: Mapping[str, Any], *, colour: bool, live: bool) -> str:
    """Check an exit code and what must never be in the output; return it, without colours.

    ``live``: what goes on may be shown in a line that is written over; it is not returned.
    """
    text = str(ended["out"] + ended["err"])
    text = GOING.sub("", text) if live else text
    assert ended["code"] in call.codes, (call, ended)
    for wrong in ("Traceback", "internal error"):
        assert wrong not in text, (call, text)
    plain = COLOUR.sub("", text) if colour else text
    assert "\x1b" not in plain, (call, plain)
    return plain


@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_of_a_terminal_breaks_what_one_would_copy(scene: Scene, width: str) -> None:
    # What takes seconds draws no table: once is enough.
    for call, ended in scene.told(every_call(slow=width == "one column"), **WIDTHS[width]):
        said = words_of(sound(call, ended, colour=True, live=width == "two hundred columns"))
        # Help is made of sentences, which are broken; tests/unit/test_command_places.py looks at what is in them.
        missing = frozenset() if "--help" in call.words else scene.values[call.words, call.changed] - said
        # At a terminal the time and the colours are other ones; names, ids, paths and options are the same.
        assert missing == frozenset(), (call, ended["out"])


def test_there_is_something_to_break(scene: Scene) -> None:
    for words in ("ps", "ps --json", "inspect kept", "render", "verify", "df --json"):
        assert max(map(len, scene.values[words, False])) > 40, words
    for words in ("status", "denied", "logs kept", "policy hash", "policy diff", "prune --dry-run"):
        assert scene.values[words, words == "policy diff"], words
    told = scene.told(texts(), columns=80)
    coloured = [call.words for call, ended in told if "\x1b" in ended["out"]]
    assert "status" in coloured and "denied" in coloured, coloured


@pytest.mark.parametrize("environment", COLOURLESS)
def test_without_colours_nothing_but_what_is_written_over_commands_a_terminal_that_is_known(
    scene: Scene, environment: str
) -> None:
    calls = every_call(slow=True) if environment == "no colour" else texts()
    for call, ended in scene.told(calls, **{"columns": 80, **COLOURLESS[environment]}):
        sound(call, ended, colour=False, live=environment == "no colour")


def test_nothing_that_goes_into_a_pipe_has_a_colour(scene: Scene) -> None:
    for call, ended in scene.piped:
        sound(call, ended, colour=False, live=False)
        if "--json" in call.words and not call.words.startswith("logs"):
            json.loads(ended["out"])


@pytest.mark.parametrize("environment", OTHERS)
def test_every_reading_command_works_in_an_odd_environment(scene: Scene, environment: str) -> None:
    for columns in (80, None) if environment == "ascii" else (80,):
        for call, ended in scene.told(one_each(), columns=columns, **OTHERS[environment]):
            at_one = columns is not None
            sound(call, ended, colour=at_one, live=at_one)


def test_what_changes_files_and_approval_works_at_a_terminal(host: Host) -> None:
    project = host.project("reading-undone")
    begun = ("corral", "run", "--", "sh", "-c", "echo '#!' >.envrc")
    said = at_terminal(host.box, project.path, [], *begun)
    assert said["code"] == 0
    found = re.search(r"corral revert (\S+)", COLOUR.sub("", said["said"]))
    assert found, said
    assert project.exists(".envrc")
    said = at_terminal(host.box, project.path, [], "corral", "revert", found[1], COLUMNS="1")
    assert said["code"] == 0 and not project.exists(".envrc"), said
    project.policy(BASE_POLICY + "    - not-approved.reads.corral.example\n", approve=False)
    assert project.corral("policy", "diff", check=False).returncode == 1
    words = 'corral policy accept "$(corral policy hash)"'
    said = at_terminal(host.box, project.path, [], "sh", "-c", words, COLUMNS="1")
    assert said["code"] == 0, said
    assert project.corral("policy", "diff").returncode == 0
