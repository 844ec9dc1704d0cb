"""The image: both builders, and what must not be in it."""

from __future__ import annotations

import pytest

from .host import Host

pytestmark = pytest.mark.representative

LOOK = """\
find / -xdev -perm /6000 -type f 2>/dev/null
for program in node npm sudo doas pkexec iptables nft ipset; do command -v $program; done
id -un; id -gn; echo "$HOME"; opencode --version; rg --version | head -n 1; git --version
"""


def test_the_image_has_the_agent_and_nothing_that_widens(host: Host) -> None:
    project = host.project("image")
    project.corral("build", timeout=400)
    seen = project.inside("sh", "-c", LOOK).stdout.splitlines()
    assert seen[:3] == ["agent", "agent", "/home/agent"], seen
    assert seen[3] == "1.18.33"
    assert seen[4].startswith("ripgrep ")
    assert seen[5].startswith("git version ")


NO_BUILDX = pytest.mark.engine(
    "trixie", "sid", reason="Debian's Docker 20.10 comes without the buildx plugin"
)


@pytest.mark.parametrize(
    "buildkit",
    [
        pytest.param("0", id="classic", marks=pytest.mark.smoke),
        pytest.param("1", id="buildkit", marks=NO_BUILDX),
    ],
)
def test_both_builders_build_without_pulling_and_an_unchanged_image_is_kept(
    host: Host, buildkit: str
) -> None:
    project = host.project(f"builder{buildkit}")
    since = host.box.run(["date", "+%s"]).stdout.strip()
    project.corral("build", timeout=900, env={"DOCKER_BUILDKIT": buildkit})
    until = host.box.run(["date", "+%s.%N"]).stdout.strip()
    seen = host.box.run(["docker", "events", "--since", since, "--until", until, "--filter", "event=pull"])
    assert seen.stdout == ""
    assert project.corral("build", "--help").returncode == 0
    log = host.shell(f"cat ~/.local/share/corral/builder{buildkit}-*/build.log").stdout
    assert ("#1 [internal]" in log) is (buildkit == "1"), log[:2000]
    assert ("Step 1/" in log) is (buildkit == "0"), log[:2000]

    def images() -> set[str]:
        return set(
            host.box.run(["docker", "images", "--format", "{{.Repository}} {{.ID}}"]).stdout.splitlines()
        )

    before = images()
    assert any(line.startswith(f"corral/builder{buildkit}-") for line in before)
    project.corral("build", timeout=900, env={"DOCKER_BUILDKIT": buildkit})
    assert images() == before
    assert project.inside("id", "-un").stdout.strip() == "agent"


def test_the_way_to_the_registries_is_open_to_builds_and_closed_to_sandboxes(host: Host) -> None:
    project = host.project("registry")
    proxy = host.box.run(["printenv", "http_proxy"]).stdout.strip()
    curl = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}"]
    assert host.plain(*curl, proxy).stdout != "000"
    done = project.inside(*curl, proxy, check=False)
    assert (done.stdout, done.returncode) == ("000", 7)
    environ = project.inside("env").stdout.lower()
    assert "proxy" not in environ
