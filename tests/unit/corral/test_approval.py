"""Approving a policy: who is asked what, what is refused, and what is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corral import approval, cli
from corral.cli import main
from corral.context import Invocation
from corral.session import User
from policy.errors import CorralError, PolicyError
from policy.identity import StatePaths
from policy.loader import LoadedPolicy
from policy.revision import revision
from tests.unit.corral.conftest import POLICY

WIDER = POLICY + "    - wide.example.com\n"
NARROWER = POLICY.replace("    - api.example.com\n", "")

Load = Callable[..., LoadedPolicy]


class Desk:
    """A sandbox's records, and somebody who may or may not sit there."""

    def __init__(self, invocation: Invocation) -> None:
        self.paths = invocation.paths
        self.told: list[str] = []
        self.asked: list[str] = []

    def use(self, loaded: LoadedPolicy, *, accepted: str | None = None, answer: bool | None = None) -> None:
        def ask(question: str) -> bool:
            self.asked.append(question)
            return bool(answer)

        approval.approve(
            loaded,
            self.paths,
            accepted=accepted,
            ask=None if answer is None else ask,
            tell=self.told.append,
            record=lambda found: approval.write(self.paths, found, loaded),
        )

    def refuses(self, loaded: LoadedPolicy, **how: bool | str) -> CorralError:
        before = approval.read(self.paths, loaded)
        with pytest.raises(CorralError) as caught:
            self.use(loaded, **how)  # type: ignore[arg-type]
        assert approval.read(self.paths, loaded) == before
        assert caught.value.exit_code == 2
        return caught.value


@pytest.fixture
def desk(invocation: Invocation) -> Desk:
    return Desk(invocation)


def test_a_policy_that_came_with_a_clone_is_refused_with_all_it_allows(desk: Desk, loaded_of: Load) -> None:
    loaded = loaded_of()
    error = desk.refuses(loaded)
    assert error.message.startswith(approval.NEVER)
    assert "+ reach api.example.com:443" in error.message
    assert f"+ write {loaded.project}" in error.message
    assert error.hint is not None
    assert error.hint.endswith(f"--accept-policy {revision(loaded).sha256}")


def test_the_hash_of_this_very_policy_approves_it(desk: Desk, loaded_of: Load) -> None:
    loaded = loaded_of()
    desk.use(loaded, accepted="sha256:" + revision(loaded).sha256)
    desk.use(loaded)
    assert approval.read(desk.paths, loaded) == revision(loaded)
    assert not desk.told


@pytest.mark.parametrize("sha", ["0" * 64, "", "yes", "0" * 63])
def test_any_other_hash_is_refused_even_when_the_policy_is_approved(
    sha: str, desk: Desk, loaded_of: Load
) -> None:
    loaded = loaded_of()
    desk.use(loaded, answer=True)
    desk.refuses(loaded, accepted=sha)


def test_the_hash_of_an_earlier_policy_does_not_approve_a_wider_one(desk: Desk, loaded_of: Load) -> None:
    loaded = loaded_of()
    sha = revision(loaded).sha256
    desk.use(loaded, accepted=sha)
    desk.refuses(loaded_of(WIDER), accepted=sha)


def test_what_is_new_is_asked_at_a_terminal_and_nothing_else(desk: Desk, loaded_of: Load) -> None:
    desk.use(loaded_of(), answer=True)
    wider = loaded_of(WIDER)
    desk.use(wider, answer=True)
    assert desk.asked[1].splitlines()[1:] == ["  + reach wide.example.com:443", "allow that?"]
    desk.use(wider)
    assert len(desk.asked) == 2


def test_no_answer_is_no(desk: Desk, loaded_of: Load) -> None:
    desk.refuses(loaded_of(), answer=False)


def test_allowing_less_passes_with_a_notice_and_getting_it_back_is_asked(desk: Desk, loaded_of: Load) -> None:
    desk.use(loaded_of(), answer=True)
    narrow = loaded_of(NARROWER)
    desk.use(narrow)
    assert desk.told == ["the policy allows less than before:", "  - reach api.example.com:443"]
    assert approval.read(desk.paths, narrow) == revision(narrow)
    desk.refuses(loaded_of())


def test_a_comment_is_no_change(desk: Desk, loaded_of: Load) -> None:
    desk.use(loaded_of(), answer=True)
    desk.use(loaded_of("# words\n" + POLICY))
    assert not desk.told


@pytest.mark.parametrize("damage", ["", "{}", "null", "[1]", "{", '{"revision": 1, "sha256": 2}', "wider"])
def test_a_damaged_record_approves_nothing(damage: str, desk: Desk, loaded_of: Load) -> None:
    loaded = loaded_of()
    desk.use(loaded, answer=True)
    file = desk.paths.root / approval.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    if damage == "wider":
        body = json.loads(file.read_text())
        damage = json.dumps({**body, "revision": revision(loaded_of(WIDER)).canonical()})
    file.write_text(damage)
    desk.refuses(loaded_of())


def test_another_name_is_another_sandbox_that_nobody_approved(
    invocation: Invocation, user: User, loaded_of: Load
) -> None:
    Desk(invocation).use(loaded_of(), answer=True)
    loaded_of(POLICY.replace("demo", "other"))
    later = Invocation(user, invocation.cwd, invocation.console)
    with pytest.raises(PolicyError, match=r"nobody has approved"):
        _ = later.approved


def test_what_was_refused_leaves_nothing_behind(
    user: User, loaded: LoadedPolicy, invocation: Invocation
) -> None:
    before = sorted(user.home.rglob("*"))
    with pytest.raises(PolicyError):
        _ = Invocation(user, loaded.project, invocation.console).approved
    assert sorted(user.home.rglob("*")) == before


@pytest.fixture
def shell(home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "DOCKER_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(project)
    monkeypatch.setattr(cli, "_end_on_signals", lambda: None)
    (project / "corral.yaml").write_text(POLICY)
    (project / "corral.yaml").chmod(0o644)
    if os.getuid() == 0:
        monkeypatch.setattr("corral.lifecycle.refuse_root", lambda _: None)


@pytest.mark.usefixtures("shell")
def test_every_command_that_builds_starts_or_executes_refuses_an_unapproved_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["build"], ["build", "--force"], ["run"], ["run", "--", "true"], ["shell"], ["verify"]):
        assert main(command) == 2, command
        assert "nobody has approved this policy yet" in capsys.readouterr().err
    assert main(["policy", "hash"]) == 0
    sha = capsys.readouterr().out.strip()
    for command in ("run", "shell", "verify"):
        # Approved, and the next thing that is missing is the enforcer.
        assert main([command, "--accept-policy", sha]) == 1
        assert "enforcer" in capsys.readouterr().err
        assert main([command, "--accept-policy", "0" * 64]) == 2
        capsys.readouterr()


@pytest.mark.usefixtures("shell")
def test_the_difference_is_shown_for_people_and_programs(
    capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    assert main(["policy", "diff"]) == 1
    assert "+ reach api.example.com:443  (allows more)" in capsys.readouterr().out
    assert main(["policy", "hash"]) == 0
    sha = capsys.readouterr().out.strip()
    assert main(["policy", "accept", "0" * 64]) == 2
    assert main(["policy", "accept", sha]) == 0
    capsys.readouterr()
    assert main(["policy", "diff"]) == 0
    assert capsys.readouterr().out == "the policy is approved as it is\n"
    (project / "corral.yaml").write_text(WIDER)
    assert main(["policy", "diff", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["approved"] == sha
    assert body["widens"] is True
    assert body["changes"] == [{"sign": "+", "text": "reach wide.example.com:443", "widens": True}]


@pytest.mark.usefixtures("shell")
def test_init_approves_what_it_writes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "corral.yaml").unlink()
    assert main(["init"]) == 0
    assert main(["policy", "diff"]) == 0


@pytest.mark.usefixtures("shell")
def test_init_leaves_nothing_where_no_project_can_be(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["init"]) == 2
    assert "refusing to mount your home directory" in capsys.readouterr().err
    assert not (home / "corral.yaml").exists()


def test_an_image_of_the_environment_has_to_be_approved(invocation: Invocation, user: User) -> None:
    first = Invocation(user, invocation.cwd, invocation.console, ask=lambda _: True)
    assert first.approved.policy.image is None
    user = replace(user, environ={**user.environ, "CORRAL_SANDBOX_IMAGE": "debian:12"})
    with pytest.raises(PolicyError, match="allows more than was approved") as caught:
        _ = Invocation(user, invocation.cwd, invocation.console).approved
    assert 'image: default -> "debian:12"' in caught.value.message
    asked = Invocation(user, invocation.cwd, invocation.console, ask=lambda _: True)
    assert asked.approved.policy.image == "debian:12"


@pytest.mark.parametrize(
    "command",
    [
        ["policy"],
        ["policy", "hash"],
        ["policy", "diff"],
        ["policy", "accept"],
        ["schema"],
        ["render"],
        ["revert"],
    ],
)
def test_each_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "Usage: corral" in capsys.readouterr().out


@pytest.mark.usefixtures("shell")
def test_the_schema_is_printed_without_a_policy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "corral.yaml").unlink()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "corral.yaml"


def test_another_name_or_directory_has_no_part_in_what_was_approved(desk: Desk, loaded_of: Load) -> None:
    loaded = loaded_of()
    desk.use(loaded, answer=True)
    other = loaded.policy.model_copy(update={"name": "other"})
    for stranger in (replace(loaded, policy=other), replace(loaded, project=loaded.project / "below")):
        # Even with the very same id, which is short: its record is not theirs.
        assert approval.read(desk.paths, stranger) is None


def test_a_name_that_was_given_up_is_not_approved_when_it_comes_back(
    invocation: Invocation, loaded_of: Load
) -> None:
    first, second = loaded_of(), loaded_of(POLICY.replace("name: demo", "name: other"))
    paths = {loaded.sandbox.id: StatePaths(invocation.data / loaded.sandbox.id) for loaded in (first, second)}
    assert len(paths) == 2
    approval.write(paths[first.sandbox.id], revision(first), first)
    assert not approval.pending(first, paths[first.sandbox.id]).widens
    approval.write(paths[second.sandbox.id], revision(second), second)
    assert not approval.pending(second, paths[second.sandbox.id]).widens
    assert approval.pending(first, paths[first.sandbox.id]).widens
