"""Looking at what a session left, removing a sandbox for good, and room on the disk."""

from __future__ import annotations

import json

import pytest

from .host import BASE_POLICY, Host, until

SECRET = "hunter2-hunter2"


@pytest.mark.representative
def test_what_was_kept_can_be_looked_at_and_shows_no_secret(host: Host) -> None:
    host.box.write("/home/dev/.config/corral/look.env", f"API_KEY={SECRET}\n", mode=0o600)
    project = host.project(
        "look", BASE_POLICY + "keep: true\nsecrets:\n  env_file: ~/.config/corral/look.env\n"
    )
    project.inside("sh", "-c", 'echo "key is $API_KEY"; exit 3', check=False, timeout=300)
    body = json.loads(project.corral("inspect", "--json").stdout)
    text = project.corral("inspect").stdout
    assert (body["ending"]["code"], body["ending"]["running"]) == (3, False)
    assert body["last"][-1] == "key is ***"
    assert {"source": project.path, "target": project.path, "read_only": False} in body["mounts"]
    assert "allowed1.corral.example" in json.dumps(body["egress"])
    assert SECRET not in json.dumps(body) + text
    assert "exit code 3" in text
    # The same name once it runs again: what runs is meant.
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    assert json.loads(project.corral("inspect", "--json").stdout)["ending"]["running"]
    host.box.kill(process)


@pytest.mark.representative
def test_a_purged_sandbox_leaves_its_project_and_nothing_else(host: Host) -> None:
    project = host.project("gone", BASE_POLICY + "keep: true\n")
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    sandbox = project.sandbox["sandbox"]
    done = project.corral("down", "--purge", check=False)
    assert (done.returncode, "--yes" in done.stderr) == (1, True)
    assert len(project.containers()) == 1
    done = project.corral("down", "--purge", "--yes")
    assert project.containers() == []
    for listing in (
        f"docker images -q 'corral/{sandbox}'",
        f"docker network ls -q --filter label=io.corral.sandbox={sandbox}",
        f"ls -d ~/.local/share/corral/{sandbox} 2>/dev/null || true",
        f"ls ~/.config/systemd/user | grep {sandbox[-8:]} || true",
    ):
        assert host.shell(listing).stdout == "", listing
    assert project.exists("corral.yaml")
    # What was approved is forgotten as well.
    assert project.corral("run", "--", "true", check=False).returncode == 2


@pytest.mark.representative
def test_room_is_counted_and_a_build_without_it_does_not_begin(host: Host) -> None:
    project = host.project("room")
    project.inside("sh", "-c", "true", timeout=300)
    body = json.loads(project.corral("df", "--json").stdout)
    (row,) = [row for row in body["sandboxes"] if row["sandbox"].startswith("room-")]
    assert row["image"]["size"] > 10**8
    assert row["build"] > 0 and row["project"] == project.path
    assert body["layers"] > 0 and len(body["places"]) == 2
    state = f"{host.box.home}/.local/share/corral"
    # Approved it is, and nearly nothing can be written beside it.
    host.shell(
        f"mv {state} {state}.away; mkdir {state}; mount -t tmpfs -o size=8m,uid=1000,gid=1000 small {state}; "
        f"cp -a {state}.away/{row['sandbox']} {state}/; chown 1000:1000 {state}; "
        f"cp -a {state}.away/state.json {state}/ 2>/dev/null || true",
        user="root",
    )
    try:
        done = project.corral("build", "--force", check=False)
        assert (done.returncode, "there is no room to build" in done.stderr) == (1, True), done.stderr
        assert "corral prune --images" in done.stderr
    finally:
        host.shell(f"umount {state}; rmdir {state}; mv {state}.away {state}", user="root")
        host.user_systemctl("restart", "corral-enforcer")
        until(lambda: project.corral("status", check=False).returncode == 0, 30, "the service is back")
