"""``corral policy ...``: the policy itself, and which revision of it is approved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from corral import answers
from corral.commands import Json, _finish, _invocation, _print, app
from corral.parser import App

if TYPE_CHECKING:
    from corral.approval import Pending
    from corral.context import Invocation

policy_app = App(name="policy")
app.add_typer(policy_app)


@policy_app.callback()
def _policy() -> None:
    """Look at this directory's policy, and approve it.

    \b
    Examples:
      corral policy diff
      corral policy check api.example.com:443
    """


@app.command()
def schema() -> None:
    """Print the JSON Schema of corral.yaml, for editors.

    \b
    Examples:
      corral schema >corral.schema.json
    """

    def action() -> None:
        from policy.reference import schema_text

        _print(schema_text().rstrip("\n"))

    _finish(action)


@app.command()
def render(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with what is built; exit 1 when it differs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print what the policy becomes: Dockerfile, labels, mounts, network, kernel entries. Changes nothing.

    \b
    Examples:
      corral render
      corral render --check
    """

    def action() -> int:
        from corral import render as view

        invocation = _invocation()
        if check:
            found = view.differences(invocation)
            _print(answers.text({"differences": found}) if as_json else view.checked(found))
            return int(bool(found))
        rendered = view.rendered(invocation)
        _print(answers.text(rendered) if as_json else view.text(rendered))
        return 0

    _finish(action)


@app.command()
def revert(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="As it was told when the session ended.")],
) -> None:
    """Put back files that a session changed and this host executes, as they were before it.

    A file that was changed again since is put back all the same.

    \b
    Examples:
      corral revert 0a1b2c3d
    """

    def action() -> None:
        from corral import protect

        invocation = _invocation()
        for line in protect.revert(protect.record_of(invocation.data, invocation.cwd, session)):
            _print(line)

    _finish(action)


def _pending(invocation: Invocation) -> Pending:
    from corral.approval import pending

    return pending(invocation.loaded, invocation.read_paths)


@policy_app.command("hash")
def hash_(as_json: Json = False) -> None:
    """Print the hash of what the policy allows: resolved paths and the profile's names, not comments.

    corral policy diff prints it too, below what it is the hash of.

    \b
    Examples:
      corral policy hash
    """

    def action() -> None:
        from policy.revision import revision

        sha256 = revision(_invocation().loaded).sha256
        _print(answers.text({"policy": sha256}) if as_json else sha256)

    _finish(action)


@policy_app.command()
def diff(as_json: Json = False) -> None:
    """Show what of the policy is not approved; exit 1 when it allows more than was.

    '+' is new, '-' is gone, '~' is different.

    \b
    Examples:
      corral policy diff
      corral policy diff --json
    """

    def action() -> int:
        found = _pending(_invocation())
        if as_json:
            _print(answers.text(found.body()))
        elif not found.changes:
            _print("the policy is approved as it is")
        else:
            told = {True: "  (allows more)", False: ""}
            _print("\n".join(change.line() + told[change.widens] for change in found.changes))
            _print(f"corral policy accept {found.new.sha256}")
        return int(found.widens)

    _finish(action)


@policy_app.command()
def accept(
    sha: Annotated[str, typer.Argument(metavar="SHA", help="As corral policy diff printed it.")],
) -> None:
    """Approve the policy without building or starting anything.

    Take the hash from the very diff you read: asked for again, it is that of what the file says by then.

    \b
    Examples:
      corral policy accept 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
    """

    def action() -> None:
        from corral import approval

        invocation = _invocation()
        found = _pending(invocation)
        approval.check_sha(found.new, sha)
        approval.write(invocation.paths, found.new, invocation.loaded)
        _print(f"approved {invocation.loaded.path} ({found.new.sha256[:12]})")

    _finish(action)
