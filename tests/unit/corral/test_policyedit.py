from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from corral import policyedit
from corral.policyedit import reach, save, unsave
from policy.errors import CorralError, PolicyError
from policy.loader import LoadedPolicy, load
from policy.revision import revision

POLICY = """\
profile: opencode
egress:
  profile_defaults: false
  allow:
    - {host: a.example.com, optional: true}   # why
"""


@pytest.fixture
def again(home: Path) -> Callable[[Path], LoadedPolicy]:
    return lambda path: load(path, home=home, environ={}, uid=os.getuid(), own=())


@pytest.fixture
def policy(project: Path, again: Callable[[Path], LoadedPolicy]) -> LoadedPolicy:
    (project / "corral.yaml").write_text(POLICY)
    (project / "corral.yaml").chmod(0o640)
    return again(project / "corral.yaml")


Again = Callable[[Path], LoadedPolicy]


def test_a_name_is_written_and_the_file_keeps_its_mode(policy: LoadedPolicy, again: Again) -> None:
    told: list[tuple[LoadedPolicy, LoadedPolicy]] = []
    made = save(policy, "b.example.com", (443, 22), again, saved=lambda *both: told.append(both))
    assert told == [(policy, made)]
    assert reach(made.declaration) == {"a.example.com": {443}, "b.example.com": {443, 22}}
    assert policy.path.read_text() == POLICY + "    - {host: b.example.com, ports: [443, 22]}\n"
    assert policy.path.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in policy.path.parent.glob("*corral.yaml*")) == ["corral.yaml"]


def test_a_port_is_added_with_the_wishes_of_the_name(policy: LoadedPolicy, again: Again) -> None:
    made = save(policy, "a.example.com", (443, 8443), again)
    (name,) = made.declaration.names
    assert (set(name.ports), name.optional) == ({443, 8443}, True)


def test_what_is_there_is_not_written_again(policy: LoadedPolicy, again: Again) -> None:
    assert save(policy, "a.example.com", (443,), again) is policy
    assert policy.path.read_text() == POLICY


def test_a_symbolic_link_stays_one(policy: LoadedPolicy, again: Again, home: Path) -> None:
    real = policy.path.rename(policy.path.with_name("real.yaml"))
    policy.path.symlink_to(real)
    save(policy, "b.example.com", (443,), again)
    assert policy.path.is_symlink()
    assert "b.example.com" in real.read_text()


def test_a_file_that_changed_meanwhile_is_left_alone(policy: LoadedPolicy, again: Again) -> None:
    policy.path.write_text(POLICY + "name: other\n")
    with pytest.raises(PolicyError, match="changed while"):
        save(policy, "b.example.com", (443,), again)
    assert policy.path.read_text() == POLICY + "name: other\n"


@pytest.mark.parametrize(
    "damage", ["    - evil.example.com\n", "name: other\n", "host_services: [{name: x, port: 1}]\n"]
)
def test_an_edit_that_would_say_something_else_is_not_made(
    policy: LoadedPolicy, again: Again, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    right = policyedit.add_entry
    monkeypatch.setattr(policyedit, "add_entry", lambda text, new: right(text, new) + damage)
    with pytest.raises(PolicyError, match="would not say what it should") as caught:
        save(policy, "b.example.com", (443,), again)
    assert "yourself: - b.example.com" in (caught.value.hint or "")
    assert policy.path.read_text() == POLICY


@pytest.mark.parametrize("when", ["after it was read", "after it took its place"])
def test_what_an_agent_writes_meanwhile_is_not_what_was_saved(
    policy: LoadedPolicy, again: Again, when: str
) -> None:
    told: list[LoadedPolicy] = []

    def quick(path: Path) -> LoadedPolicy:
        made = again(path)
        if path.name.endswith(".new") and when == "after it was read":
            path.write_text(path.read_text() + "    - evil.example.com\n")
        return made

    def saved(_before: LoadedPolicy, after: LoadedPolicy) -> None:
        told.append(after)

    made = save(policy, "b.example.com", (443,), quick, saved=saved)
    if when == "after it took its place":
        policy.path.write_text(policy.path.read_text() + "    - evil.example.com\n")
    assert told == [made]
    assert made.path == policy.path
    assert set(reach(made.declaration)) == {"a.example.com", "b.example.com"}
    # What the file says by now is a policy of its own, and nobody has approved it.
    assert revision(again(policy.path)) != revision(made)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_cannot_be_written_is_told(policy: LoadedPolicy, again: Again) -> None:
    policy.path.parent.chmod(0o500)
    try:
        with pytest.raises(CorralError, match="cannot write"):
            save(policy, "b.example.com", (443,), again)
    finally:
        policy.path.parent.chmod(0o700)


def test_a_name_is_taken_out_and_that_is_told_once_it_is(policy: LoadedPolicy, again: Again) -> None:
    save(policy, "b.example.com", (443,), again)
    told: list[tuple[LoadedPolicy, LoadedPolicy]] = []
    before = again(policy.path)
    made = unsave(before, "b.example.com", again, saved=lambda *both: told.append(both))
    assert told == [(before, made)]
    assert reach(made.declaration) == {"a.example.com": {443}}
    assert policy.path.read_text() == POLICY
    assert policy.path.stat().st_mode & 0o777 == 0o640
    assert unsave(made, "b.example.com", again, saved=lambda *both: told.append(both)) is made
    assert len(told) == 1


def test_the_last_name_is_taken_out_and_the_list_is_empty(policy: LoadedPolicy, again: Again) -> None:
    made = unsave(policy, "a.example.com", again)
    assert reach(made.declaration) == {}
    assert policy.path.read_text().endswith("  allow: []\n")


def test_what_the_profile_gives_is_not_taken_out_of_the_file(project: Path, again: Again) -> None:
    (project / "corral.yaml").write_text(POLICY.replace("false", "true"))
    loaded = again(project / "corral.yaml")
    own = next(name.host for name in loaded.declaration.names if name.host != "a.example.com")
    with pytest.raises(PolicyError, match=r"is no entry of egress\.allow"):
        unsave(loaded, own, again)


def test_what_an_agent_writes_while_a_name_is_taken_out_is_not_what_was_saved(
    policy: LoadedPolicy, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    hers = POLICY + "    - hers.example.com\n"
    replace = Path.replace

    def racing(partial: Path, target: Path) -> Path:
        done = replace(partial, target)
        target.write_text(hers)
        return done

    monkeypatch.setattr(Path, "replace", racing)
    told: list[LoadedPolicy] = []
    unsave(policy, "a.example.com", again, saved=lambda _before, after: told.append(after))
    assert [reach(after.declaration) for after in told] == [{}]
    (policy.path).write_text(hers)
    with pytest.raises(PolicyError, match="changed while it was being edited"):
        unsave(policy, "a.example.com", again)


# -- zones, regular expressions, and what a proxy is asked for


def rewritten(policy: LoadedPolicy, again: Again, text: str) -> LoadedPolicy:
    policy.path.write_text(text)
    return again(policy.path)


def test_a_zone_and_an_expression_are_written_in_quotes(policy: LoadedPolicy, again: Again) -> None:
    made = save(policy, "*.example.org", (443,), again)
    assert made.declaration.proxied
    made = save(made, r"regex:(a|b)\.example\.net", (22, 443), again)
    assert policy.path.read_text() == POLICY + (
        "    - '*.example.org'\n    - {host: 'regex:(a|b)\\.example\\.net', ports: [22, 443]}\n"
    )
    assert [pattern.host for pattern in made.declaration.patterns][1:] == [
        "*.example.org",
        r"regex:(a|b)\.example\.net",
    ]


def test_a_port_is_added_to_a_zone_with_what_the_zone_wishes(policy: LoadedPolicy, again: Again) -> None:
    zone = rewritten(
        policy, again, "profile: opencode\negress: {allow: [{host: '*.example.org', sni: false}]}\n"
    )
    made = save(zone, "*.example.org", (8443,), again)
    (pattern,) = [one for one in made.declaration.patterns if one.host == "*.example.org"]
    assert (set(pattern.ports), pattern.sni) == ({443, 8443}, False)


def test_a_name_is_saved_where_none_is_pinned_and_not_twice(policy: LoadedPolicy, again: Again) -> None:
    proxied = rewritten(policy, again, "profile: opencode\negress:\n  mode: proxy\n")
    made = save(proxied, "b.example.com", (443,), again)
    assert "b.example.com" in {pattern.host for pattern in made.declaration.patterns}
    assert made.declaration.names == ()
    assert save(made, "b.example.com", (443,), again) is made


def test_a_zone_is_taken_out_however_it_is_written(policy: LoadedPolicy, again: Again) -> None:
    text = POLICY + "    - '*.Example.org'\n    - ^a{2}\\.example\\.net$\n"
    zone = rewritten(policy, again, text)
    made = unsave(zone, "*.example.org", again)
    made = unsave(made, r"regex:a{2}\.example\.net", again)
    assert policy.path.read_text() == POLICY
    assert not made.declaration.proxied


def test_no_part_of_a_zone_can_be_taken_out(policy: LoadedPolicy, again: Again) -> None:
    zone = rewritten(policy, again, POLICY + "    - '*.example.org'\n")
    with pytest.raises(PolicyError, match=r"allowed by \*\.example\.org") as caught:
        unsave(zone, "a.example.org", again)
    assert "corral deny '*.example.org' --save" in (caught.value.hint or "")


def test_what_the_hosts_clients_name_meanwhile_is_not_saved_with_it(
    policy: LoadedPolicy, again: Again, home: Path
) -> None:
    text = "profile: opencode\negress:\n  from_host: [npm]\n  allow: [a.example.com]\n"
    before = rewritten(policy, again, text)

    def later(path: Path) -> LoadedPolicy:
        (home / ".npmrc").write_text("registry=https://npm.example.org/\n")
        return again(path)

    with pytest.raises(PolicyError, match="would not say"):
        save(before, "b.example.com", (443,), later)
    assert policy.path.read_text() == text


def test_an_edit_that_would_leave_a_policy_that_is_refused_changes_nothing_and_says_why(
    policy: LoadedPolicy, again: Again
) -> None:
    text = "profile: opencode\negress: {allow: ['*.example.com', {host: b.example.org, protocol: tcp}]}\n"
    zone = rewritten(policy, again, text)
    with pytest.raises(PolicyError) as caught:
        unsave(zone, "*.example.com", again)
    told = caught.value.message
    assert "has no proxy" in told and f"{zone.path} stays as it is" in told and ".new" not in told
    assert "yourself" in str(caught.value.hint)
    assert zone.path.read_text() == text
