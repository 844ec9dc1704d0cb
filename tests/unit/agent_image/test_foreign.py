"""An existing image: what of its configuration reaches a session, and what its layer does to its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, NotFound

from agent_image import dockerfile
from agent_image.context import digest, files
from agent_image.files.prepare import main as prepare
from agent_image.foreign import Foreign, examine, insist, missing
from policy.errors import CorralError, EngineError
from tests.unit.agent_image.goldens import opencode

IDENT = "sha256:" + "1" * 64
TAG = "corral/demo-0a0b0c0d:base"
STANDARD = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def image(**config: Any) -> dict[str, Any]:
    return {"Id": IDENT, "Os": "linux", "Config": config}


def layer(found: Foreign) -> str:
    return dockerfile.render(opencode(foreign=found)).split(f"\nFROM {TAG}\n")[1]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"Volumes": {"/data": {}, "/etc": {}}}, "volumes (/data, /etc)"),
        ({"OnBuild": ["RUN true"]}, "ONBUILD"),
        ({"Labels": {"io.corral.connection": "host"}}, "labels of corral's own (io.corral.connection)"),
        ({"Labels": {"io.corral.inputs": "sha256:0"}}, "labels of corral's own"),
        ({"Env": ["a b=1"]}, "odd name"),
        ({"Env": ['X"\nRUN evil=1']}, "odd name"),
    ],
)
def test_what_no_later_layer_can_undo_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(CorralError, match=r"image") as caught:
        examine("tools:3", TAG, image(**config))
    assert told in caught.value.message


def test_every_reason_is_told_at_once() -> None:
    with pytest.raises(CorralError) as caught:
        examine("tools:3", TAG, {**image(Volumes={"/d": {}}, OnBuild=["RUN x"]), "Os": "windows"})
    assert caught.value.message.count("\n") == 3


@pytest.mark.parametrize(
    "row", ["LD_PRELOAD=/p/x.so", "PYTHONPATH=/p", "CORRAL_SECRETS=/p/s", "BASH_ENV=/p/e"]
)
def test_variables_that_change_what_programs_do_are_emptied(row: str) -> None:
    found = examine("tools:3", TAG, image(Env=[row, "LANG=C.UTF-8", "GOLANG_VERSION=1.22"]))
    name = row.partition("=")[0]
    assert found.cleared == (name,)
    assert f'{name}=""' in layer(found)
    assert row not in layer(found)


def test_the_usual_directories_come_first_and_none_that_an_agent_could_write_comes_at_all() -> None:
    listed = "/usr/local/go/bin:.:bin::/home/me/bin:/tmp:/workspace/bin:/opt/../home/x:/usr/bin:/opt/x/bin"
    found = examine("tools:3", TAG, image(Env=[f"PATH={listed}"]))
    assert found.path == ("/usr/local/go/bin", "/opt/x/bin")
    assert f"ENV PATH={STANDARD}:/usr/local/go/bin:/opt/x/bin\n" in layer(found)


def test_all_of_its_configuration_is_said_anew_after_the_last_of_its_own() -> None:
    text = layer(
        examine("tools:3", TAG, image(User="0", Entrypoint=["/evil"], Healthcheck={"Test": ["CMD"]}))
    )
    lines = text.splitlines()
    assert lines[0] == "USER root"
    assert lines[-6:] == [
        "HEALTHCHECK NONE",
        "STOPSIGNAL SIGTERM",
        "USER 1000:1000",
        "WORKDIR /home/agent",
        'ENTRYPOINT ["/usr/local/bin/corral-entrypoint"]',
        'CMD ["/usr/local/bin/opencode"]',
    ]
    assert "apt-get" not in text


def test_another_image_behind_the_same_name_is_another_input() -> None:
    one = opencode(foreign=examine("tools:3", TAG, image()))
    other = opencode(foreign=examine("tools:3", TAG, {**image(), "Id": "sha256:" + "2" * 64}))
    assert len({digest(one), digest(other), digest(opencode())}) == 3
    assert "prepare" in {file.path for file in files(one)}
    assert "prepare" not in {file.path for file in files(opencode())}


def test_an_id_that_is_none_goes_into_no_dockerfile() -> None:
    with pytest.raises(EngineError, match="no image id"):
        examine("tools:3", TAG, {**image(), "Id": "sha256:1\nRUN evil"})


class Api:
    def __init__(self, *present: str) -> None:
        self.present = present
        self.created: list[dict[str, Any]] = []
        self.removed: list[tuple[str, bool, bool]] = []
        self.broken = False

    def create_container_from_config(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise APIError("no")
        self.created.append(config)
        return {"Id": "c"}

    def get_archive(self, container: str, path: str) -> tuple[Any, dict[str, Any]]:
        if path not in self.present:
            raise NotFound("no")
        return iter(()), {}

    def remove_container(self, container: str, *, force: bool, v: bool) -> None:
        self.removed.append((container, force, v))


def test_an_image_without_shell_or_python_is_refused_before_anything_of_it_runs() -> None:
    api = Api("/bin/sh")
    with pytest.raises(CorralError, match="has no python3, which the entrypoint needs"):
        insist(api, examine("tools:3", TAG, image()))
    assert api.removed == [("c", True, True)]
    assert api.created[0]["HostConfig"] == {"NetworkMode": "none"}
    assert missing(Api(), IDENT) == ["/bin/sh", "python3"]
    assert missing(Api("/bin/sh", "/usr/local/bin/python3"), IDENT) == []


def test_an_engine_that_does_not_tell_is_no_image_without_a_shell() -> None:
    api = Api()
    api.broken = True
    with pytest.raises(EngineError, match="cannot look into the image"):
        missing(api, IDENT)


# -- what the layer does


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in ("etc", "usr/bin", "usr/local/bin", "opt/py/bin", "bin", "srv"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin/sh").touch()
    return tmp_path


def test_set_id_bits_and_programs_to_become_root_with_are_gone(top: Path) -> None:
    for name, mode in (("usr/bin/su", 0o4755), ("srv/deep", 0o2755), ("usr/bin/plain", 0o755)):
        (top / name).touch()
        (top / name).chmod(mode)
    (top / "usr/bin/sudo").touch()
    (top / "usr/bin/doas").symlink_to("busybox")
    outside = top.parent / "outside"
    outside.touch()
    outside.chmod(0o4755)
    (top / "srv/link").symlink_to(outside)
    prepare.disarm(top)
    assert not {path.name for path in top.rglob("*")} & prepare.BECOMING_ROOT
    assert stat.S_IMODE((top / "usr/bin/su").stat().st_mode) == 0o755
    assert stat.S_IMODE((top / "srv/deep").stat().st_mode) == 0o755
    assert stat.S_IMODE(outside.stat().st_mode) == 0o4755


@pytest.mark.parametrize("name", ["usr/local/bin", "etc"])
def test_a_link_in_place_of_a_guarding_directory_is_refused(top: Path, name: str) -> None:
    (top / name).rmdir()
    (top / name).symlink_to(top / "srv")
    with pytest.raises(prepare.Unfit, match="is no directory"):
        prepare.guard(top, owner=os.getuid())


def test_guarding_directories_are_writable_by_nobody_else(top: Path) -> None:
    (top / "usr/local/bin").chmod(0o777)
    prepare.guard(top, owner=os.getuid())
    assert stat.S_IMODE((top / "usr/local/bin").stat().st_mode) == 0o755


def test_directories_of_the_profile_are_made_and_roots(top: Path) -> None:
    prepare.guard(top, ["/etc/opencode"], os.getuid())
    assert stat.S_IMODE((top / "etc/opencode").stat().st_mode) & 0o022 == 0


def test_a_python_elsewhere_gets_the_name_that_the_entrypoint_uses(top: Path) -> None:
    prepare.interpreter(top, "/usr/local/bin/python3.12", (3, 12))
    assert (top / "usr/bin/python3").readlink() == Path("/usr/local/bin/python3.12")


def test_a_python_that_is_old_or_not_of_the_image_is_refused(top: Path) -> None:
    with pytest.raises(prepare.Unfit, match="older than"):
        prepare.interpreter(top, "/usr/bin/python3", (3, 8))
    with pytest.raises(prepare.Unfit, match="not among the image's programs"):
        prepare.interpreter(top, "/home/agent/python3", (3, 12))
    (top / "usr/bin/python3").symlink_to("/home/agent/python3")
    with pytest.raises(prepare.Unfit, match="leads to /home/agent/python3"):
        prepare.interpreter(top, "/usr/local/bin/python3", (3, 12))


def test_the_agents_ids_have_one_name(top: Path) -> None:
    (top / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\nagent:x:5:5::/:/x\n"
    )
    (top / "etc/group").write_text("root:x:0:\nnode:x:1000:\n")
    prepare.account(top, 1000, 1000)
    assert (top / "etc/passwd").read_text().splitlines() == [
        "root:x:0:0::/root:/bin/sh",
        "agent:*:1000:1000:agent:/home/agent:/bin/sh",
    ]
    assert (top / "etc/group").read_text().splitlines() == ["root:x:0:", "agent:*:1000:"]


def test_accounts_behind_a_link_are_refused(top: Path) -> None:
    (top / "etc/passwd").symlink_to(top / "srv/passwd")
    with pytest.raises(prepare.Unfit, match="no plain file"):
        prepare.account(top, 1000, 1000)


def test_the_home_is_an_empty_directory_whatever_was_there(top: Path) -> None:
    (top / "home").symlink_to(top / "srv")
    prepare.home(top, os.getuid(), os.getgid())
    assert not (top / "home").is_symlink()
    (top / "home/agent/.bashrc").touch()
    prepare.home(top, os.getuid(), os.getgid())
    assert list((top / "home/agent").iterdir()) == []
    assert list((top / "srv").iterdir()) == []
