"""An existing image as a sandbox's: whatever its configuration says, the fence is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab import Box, Internet, Lab

from .host import BASE_POLICY, FLOOD, Host

PLAIN, HOSTILE = "existing/plain:1", "existing/hostile:1"
CONFIGURATION = """\
FROM existing/plain:1
USER root
RUN touch /usr/bin/sudo && install -m 4755 /bin/true /usr/local/bin/helper && chmod 777 /usr/local/bin
RUN printf '#!/bin/sh\\ntouch /tmp/started\\n' > /start && chmod 755 /start
ENV LD_PRELOAD=/home/dev/Projects/hostile/evil.so BASH_ENV=/home/dev/Projects/hostile/evil.sh
ENV PATH=/home/dev/Projects/hostile:/opt/tools/bin:/usr/bin CORRAL_SECRETS=/home/agent/evil PYTHONPATH=/tmp
ENTRYPOINT ["/start"]
CMD ["--evil"]
HEALTHCHECK --interval=1s CMD touch /tmp/checked
STOPSIGNAL SIGUSR1
LABEL com.example.evil=1
USER root
"""
LOOK = """\
id -u; tr '\\0' '\\n' < /proc/1/cmdline | head -n 2 | tail -n 1
echo "preload=$LD_PRELOAD env=$BASH_ENV secrets=$CORRAL_SECRETS python=$PYTHONPATH"
echo "$PATH"
find / -xdev -perm /6000 2>/dev/null; ls /usr/bin/sudo 2>/dev/null; stat -c %a /usr/local/bin
ls /tmp
"""


@pytest.fixture(scope="module")
def images(lab: Lab, installed: Box) -> Iterator[Host]:
    """A plain image out of corral's own tree, without any of its configuration, and a hostile one on it."""
    internet: Internet = lab.internet
    internet.reset_names()
    host = Host(installed, internet)
    host.wait_enforcer()
    # A lab that is kept remembers the images of an earlier run.
    host.shell("rm -f ~/.local/share/corral/*/image.json")
    project = host.project("source")
    project.corral("build", timeout=500)
    host.shell(
        "c=$(docker create --network none $(docker images -q 'corral/source-*') x); "
        f"docker export $c | docker import - {PLAIN}; docker rm $c",
        timeout=200,
    )
    make(host, HOSTILE, CONFIGURATION)
    yield host
    host.end_projects()


def make(host: Host, tag: str, dockerfile: str) -> str:
    host.box.run(
        ["docker", "build", "-q", "--network", "none", "-t", tag, "-"], input=dockerfile, timeout=200
    )
    return host.box.run(["docker", "images", "-q", "--no-trunc", tag]).stdout.strip()


def policy(image: str) -> str:
    return f"image: {image}\n{BASE_POLICY}"


@pytest.mark.representative
def test_nothing_that_an_image_says_of_itself_weakens_the_fence(images: Host, host: Host) -> None:
    project = host.project("hostile", policy(HOSTILE))
    forbidden = host.internet.addresses["forbidden"]
    built = project.corral("build", timeout=500)
    assert "is not corral's: the entrypoint and the checks inside run on its Python" in built.stderr
    done = project.inside("/bin/bash", "-c", LOOK)
    assert "corral-firewall: egress policy applied" in done.stderr
    assert done.stdout.splitlines() == [
        "1000",
        "--",
        "preload= env= secrets= python=",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/tools/bin",
        "755",
    ], done.stdout
    project.inside("python3", "-c", FLOOD, forbidden, "0.2")
    assert host.internet.packets(forbidden) == 0
    host.control(forbidden)
    started = project.start("sh", "-c", "touch up; sleep 300", marker="up")
    (name,) = project.containers()
    config = json.loads(host.box.run(["docker", "inspect", name]).stdout)[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["/usr/local/bin/corral-entrypoint"]
    # 20.10 keeps the image's other words beside it.
    assert config["Healthcheck"]["Test"] == ["NONE"]
    assert config["StopSignal"] == "SIGTERM"
    assert not config["Volumes"]
    assert started.poll() is None
    verified = project.corral("verify", "--json", check=False, timeout=300)
    rows = json.loads(verified.stdout)["checks"]
    assert not [row for row in rows if row["status"] == "fail"], rows
    (told,) = {row["detail"] for row in rows if row["check"] == "foreign-image"}
    assert HOSTILE in told
    assert "say what these let them say" in told


@pytest.mark.parametrize(
    ("dockerfile", "told"),
    [
        (f"FROM {PLAIN}\nVOLUME /data\n", "it declares volumes (/data)"),
        (f"FROM {PLAIN}\nONBUILD RUN touch /built\n", "ONBUILD"),
        (f"FROM {PLAIN}\nLABEL io.corral.connection=host\n", "labels of corral's own"),
        (f"FROM {PLAIN}\nRUN rm -f /usr/bin/python3*\n", "has no python3, which the entrypoint needs"),
        ('FROM scratch\nENV A=1\nCMD ["/x"]\n', "has no /bin/sh and no python3"),
        (
            f"FROM {PLAIN}\nRUN rm -r /usr/local/bin && ln -s /home/dev/Projects/unfit /usr/local/bin\n",
            "/usr/local/bin is no directory",
        ),
    ],
    ids=["volume", "onbuild", "label", "no-python", "no-shell", "link"],
)
def test_an_image_that_cannot_be_used_is_refused_with_the_reason(
    images: Host, host: Host, dockerfile: str, told: str
) -> None:
    make(host, "existing/unfit:1", dockerfile)
    project = host.project("unfit", policy("existing/unfit:1"))
    done = project.inside("true", check=False, timeout=500)
    assert done.returncode == 1
    assert told in done.stderr
    assert not project.containers()
    assert not host.box.run(["docker", "images", "-q", "corral/unfit-*"]).stdout


def test_a_name_that_moved_is_told_and_the_image_that_was_looked_at_stays(images: Host, host: Host) -> None:
    make(host, "existing/moving:1", f"FROM {PLAIN}\nRUN echo one > /which\n")
    project = host.project("moving", policy("existing/moving:1"))
    assert project.inside("cat", "/which", timeout=500).stdout == "one\n"
    make(host, "existing/moving:1", f"FROM {PLAIN}\nRUN echo two > /which\n")
    # No name of its user's is left to it, and it is there as long as the sandbox needs it.
    for _ in range(2):
        host.box.run(["docker", "image", "prune", "-f"])
        done = project.inside("cat", "/which")
        assert done.stdout == "one\n"
        assert "this sandbox keeps the one it was built on" in done.stderr
    # What was looked at is gone: nothing is built on the other one unasked.
    host.shell("docker rmi -f $(docker images -q 'corral/moving-*' | sort -u); docker image prune -f")
    done = project.inside("cat", "/which", check=False)
    assert done.returncode == 1, done.stdout
    assert "is not there any more" in done.stderr
    assert project.corral("build", "--force", timeout=500).returncode == 0
    assert project.inside("cat", "/which").stdout == "two\n"


def test_the_environment_names_an_image_and_it_has_to_be_approved(images: Host, host: Host) -> None:
    project = host.project("named")
    environ = {"CORRAL_SANDBOX_IMAGE": PLAIN}
    refused = project.inside("true", check=False, env=environ)
    assert refused.returncode == 2
    assert f'image: default -> "{PLAIN}"' in refused.stderr
    sha = project.corral("policy", "hash", env=environ).stdout.strip()
    done = project.corral("run", "--accept-policy", sha, "--", "echo", "ran", env=environ, timeout=500)
    assert done.stdout == "ran\n"
    assert PLAIN in done.stderr
