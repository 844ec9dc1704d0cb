from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, DockerException, ImageNotFound

from agent_image.builder import MISSING, Built, both_cases, build, cli_environment, uses_buildkit
from agent_image.buildlog import Progress, hint_for
from agent_image.context import LABEL_IMAGE, LABEL_INPUTS, digest
from policy.errors import EngineError, PolicyError
from tests.unit.agent_image.goldens import opencode

ENGINE = "unix:///run/other/docker.sock"
TAG = "corral/demo-0123abcd:latest"
SECRET = "s3cret"
PROXY = f"http://me:{SECRET}@proxy.example:3128"


class Engine:
    """An engine with both builders: what is built carries the labels that were asked for."""

    def __init__(self, buildx: bool = False) -> None:
        self.images: dict[str, dict[str, Any]] = {}
        self.buildx = buildx
        self.messages: list[dict[str, Any]] = [{"stream": "Step 1/2 : FROM x\n"}, {"stream": " ---> 1\n"}]
        self.output = ["#1 [internal] load build definition"]
        self.exit_code = 0
        self.commands: list[tuple[Sequence[str], Mapping[str, str]]] = []
        self.builds: list[dict[str, Any]] = []
        self.keeps = True

    def inspect_image(self, image: str) -> dict[str, Any]:
        if image not in self.images:
            raise ImageNotFound("no such image")
        return self.images[image]

    def build(self, **options: Any) -> Iterator[dict[str, Any]]:
        self.builds.append(options)
        for message in self.messages:
            yield message
            if "error" in message:
                return
        self._keep(options["tag"], options["labels"])

    def run(self, argv: Sequence[str], env: Mapping[str, str], on_line: Progress) -> int:
        self.commands.append((argv, env))
        if list(argv[1:]) == ["buildx", "version"]:
            return 0 if self.buildx else MISSING
        for line in self.output:
            on_line(line)
        if self.exit_code == 0:
            labels = [after for word, after in pairwise(argv) if word == "--label"]
            self._keep(argv[argv.index("--tag") + 1], dict(label.split("=", 1) for label in labels))
        return self.exit_code

    def _keep(self, tag: str, labels: dict[str, str]) -> None:
        if self.keeps:
            self.images[tag] = {"Id": f"sha256:{len(self.images) + 1}", "Config": {"Labels": labels}}


class Case:
    def __init__(self, tmp_path: Path, engine: Engine) -> None:
        self.engine, self.directory, self.log = engine, tmp_path / "build", tmp_path / "build.log"
        self.shown: list[str] = []

    def build(self, **changes: Any) -> Built:
        options: dict[str, Any] = {
            "tag": TAG,
            "directory": self.directory,
            "log": self.log,
            "api": self.engine,
            "engine": ENGINE,
            "runner": self.engine,
            "environ": {"PATH": "/bin"},
            "progress": self.shown.append,
        }
        spec = changes.pop("spec", opencode())
        return build(spec, **{**options, **changes})


@pytest.fixture(params=[False, True], ids=["classic", "buildkit"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(tmp_path, Engine(buildx=request.param))


@pytest.fixture
def classic(tmp_path: Path) -> Case:
    return Case(tmp_path, Engine())


@pytest.fixture
def buildkit(tmp_path: Path) -> Case:
    return Case(tmp_path, Engine(buildx=True))


def test_image_carries_the_hash_of_its_inputs(case: Case) -> None:
    built = case.build()
    assert built == Built("sha256:1", digest(opencode()), "buildkit" if case.engine.buildx else "classic")
    assert case.engine.images[TAG]["Config"]["Labels"] == {LABEL_INPUTS: digest(opencode()), LABEL_IMAGE: TAG}


def test_unchanged_image_is_not_built_again(case: Case) -> None:
    case.build()
    case.engine.builds.clear()
    case.engine.commands.clear()
    assert case.build().builder is None
    assert (case.engine.builds, case.engine.commands) == ([], [])


def test_changed_inputs_and_force_build_again(case: Case) -> None:
    case.build()
    assert case.build(spec=opencode(uid=1001)).builder is not None
    assert case.build(spec=opencode(uid=1001), force=True).builder is not None


def test_image_that_corral_did_not_label_is_built_again(case: Case) -> None:
    case.engine.images[TAG] = {"Id": "sha256:0", "Config": {"Labels": None}}
    assert case.build().builder is not None


def test_context_is_on_disk_before_anything_is_built(classic: Case) -> None:
    classic.build()
    assert classic.engine.builds[0]["path"] == str(classic.directory)
    assert (classic.directory / "Dockerfile").exists()


def test_base_is_never_pulled_anew(case: Case) -> None:
    case.build()
    assert all(options["pull"] is False for options in case.engine.builds)
    assert all("--pull" not in argv for argv, _ in case.engine.commands)


def test_classic_builder_gets_proxies_in_the_body(classic: Case) -> None:
    classic.build(proxies={"http_proxy": PROXY, "no_proxy": "a.example"})
    assert classic.engine.builds[0]["buildargs"] == {
        "http_proxy": PROXY,
        "HTTP_PROXY": PROXY,
        "no_proxy": "a.example",
        "NO_PROXY": "a.example",
    }
    assert classic.engine.builds[0]["decode"] is True


def test_proxies_reach_buildkit_by_environment_never_by_argv(buildkit: Case) -> None:
    buildkit.build(proxies={"https_proxy": PROXY})
    argv, env = buildkit.engine.commands[-1]
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--build-arg"] == [
        "HTTPS_PROXY",
        "https_proxy",
    ]
    assert SECRET not in " ".join(argv)
    assert env == {"PATH": "/bin", "DOCKER_HOST": ENGINE, "https_proxy": PROXY, "HTTPS_PROXY": PROXY}
    assert argv[:4] == ("docker", "buildx", "build", "--load")
    assert argv[-1] == str(buildkit.directory)


def test_every_docker_command_talks_to_the_engine_of_the_api(buildkit: Case) -> None:
    detours = {
        "BUILDX_BUILDER": "remote",
        "DOCKER_CERT_PATH": "/certificates",
        "DOCKER_CONTEXT": "remote",
        "DOCKER_HOST": "ssh://elsewhere.example",
        "DOCKER_TLS": "1",
        "DOCKER_TLS_VERIFY": "1",
    }
    kept = {"PATH": "/bin", "DOCKER_CONFIG": "/home/zoe/.docker"}
    buildkit.build(environ={**kept, **detours})
    assert len(buildkit.engine.commands) == 2
    for _, env in buildkit.engine.commands:
        assert env == {**kept, "DOCKER_HOST": ENGINE}
    assert cli_environment({}, ENGINE) == {"DOCKER_HOST": ENGINE}


def test_without_proxies_no_argument_is_given(case: Case) -> None:
    case.build(proxies={"http_proxy": ""})
    assert all(options["buildargs"] == {} for options in case.engine.builds)
    assert all("--build-arg" not in argv for argv, _ in case.engine.commands)


def test_upper_case_names_are_taken_as_well() -> None:
    assert both_cases({"HTTPS_PROXY": "http://p.example", "ALL_PROXY": "socks5://p.example"}) == {
        "https_proxy": "http://p.example",
        "HTTPS_PROXY": "http://p.example",
    }


@pytest.mark.parametrize(
    ("value", "buildx", "expected"),
    [(None, True, True), ("1", True, True), ("0", True, False), ("false", True, False), (None, False, False)],
)
def test_choice_of_the_builder(value: str | None, buildx: bool, expected: bool) -> None:
    environ = {} if value is None else {"DOCKER_BUILDKIT": value}
    assert uses_buildkit(environ, Engine(buildx)) is expected


def failing(case: Case, *lines: str) -> EngineError:
    case.engine.exit_code = 1
    case.engine.output = list(lines)
    case.engine.messages = [{"stream": f"{line}\n"} for line in lines] + [
        {"error": "returned a non-zero code: 1"}
    ]
    with pytest.raises(EngineError) as caught:
        case.build(proxies={"http_proxy": PROXY})
    return caught.value


def test_failure_shows_the_last_lines_and_where_the_rest_is(case: Case) -> None:
    error = failing(case, *(f"line {number}" for number in range(30)))
    assert "| line 29" in error.message
    assert "line 17\n" not in error.message
    assert str(case.log) in str(error.hint)
    assert case.log.read_text().splitlines()[0] == "line 0"
    assert error.exit_code == 1


def test_failed_step_is_not_repeated_whole(classic: Case) -> None:
    classic.engine.messages = [{"error": "The command '/bin/sh -c a;\\n b' returned a non-zero code: 1"}]
    with pytest.raises(EngineError) as caught:
        classic.build()
    assert caught.value.message == "building the image failed: a step returned a non-zero code: 1"


def test_login_of_a_proxy_is_never_shown_or_kept(case: Case) -> None:
    error = failing(case, f"cannot connect to {PROXY}", f"password {SECRET} refused")
    assert SECRET not in error.render() + case.log.read_text() + "".join(case.shown)
    assert "***@proxy.example" in error.message


@pytest.mark.parametrize(
    ("login", "printed"),
    [
        ("me:p%40ss%2fw%C3%B6rd", "me:p%40ss%2fw%C3%B6rd"),
        ("me:p%40ss%2fw%C3%B6rd", "p@ss/wörd"),
        ("me:p%40ss%2fw%C3%B6rd", "p%40ss%2Fw%C3%B6rd"),
        ("me:p%40ss%2fw%C3%B6rd", "p%40ss%2Fw%c3%b6rd"),
        ("me:p@ss!word", "p%40ss%21word"),
        ("me:pass:word", "pass%3Aword"),
        ("to%2Bken", "to+ken"),
        ("token:", "token"),
        ("me:p%40ssw0rd", "bWU6cEBzc3cwcmQ="),
    ],
)
def test_login_of_a_proxy_is_hidden_in_every_form_that_tools_print(
    classic: Case, login: str, printed: str
) -> None:
    classic.engine.messages = [{"stream": f"<{printed}> refused\n"}, {"error": f"no: <{printed}>"}]
    with pytest.raises(EngineError) as caught:
        classic.build(proxies={"http_proxy": f"http://{login}@proxy.example:3128"})
    assert classic.shown == ["<***> refused"]
    assert classic.log.read_text() == "<***> refused\n"
    assert caught.value.message.splitlines()[0] == "building the image failed: no: <***>"


def test_without_a_login_nothing_is_hidden(classic: Case) -> None:
    classic.engine.messages = [{"stream": "proxy.example: http\n"}]
    classic.build(proxies={"http_proxy": "http://proxy.example:3128"})
    assert classic.shown == ["proxy.example: http"]


@pytest.mark.parametrize("before", [None, 0o644])
def test_log_is_the_users_own(case: Case, before: int | None) -> None:
    if before is not None:
        case.log.touch(before)
    case.build()
    assert case.log.stat().st_mode & 0o777 == 0o600


def test_redrawn_lines_and_colours_are_flattened(classic: Case) -> None:
    classic.engine.messages = [{"stream": "\x1b[91mReading 5%\rReading 100%\rRead.\n\x1b[0m"}]
    classic.build()
    assert classic.shown == ["Read."]


def test_lines_that_arrive_in_pieces_are_put_together(classic: Case) -> None:
    classic.engine.messages = [{"stream": piece} for piece in ("Step ", "1\nSt", "ep 2\n", "end")]
    classic.build()
    assert classic.shown == ["Step 1", "Step 2", "end"]


def test_what_buildkit_repeats_does_not_push_out_what_went_wrong(buildkit: Case) -> None:
    lines = ["#7 3.1 E: the real reason", "#7 ERROR: process did not complete", "------", "Dockerfile:5"]
    error = failing(
        buildkit, *lines, *(f"   {n} | >>> step" for n in range(20)), "ERROR: failed to solve: " + "x" * 999
    )
    assert error.message.splitlines()[1:] == [
        "  | #7 3.1 E: the real reason",
        "  | #7 ERROR: process did not complete",
    ]
    assert "x" * 999 in buildkit.log.read_text()


def test_long_lines_are_cut(case: Case) -> None:
    assert max(map(len, failing(case, "y" * 5000).message.splitlines())) < 200


def test_pull_of_the_base_is_shown_without_its_progress_bars(classic: Case) -> None:
    classic.engine.messages = [
        {"status": "Downloading", "progress": "[=> ]", "id": "abc"},
        {"status": "Pull complete", "id": "abc"},
        {"aux": {"ID": "sha256:1"}},
    ]
    classic.build()
    assert classic.shown == ["abc Pull complete"]


@pytest.mark.parametrize(
    "error", [APIError("500 boom"), DockerException("gone"), ConnectionResetError("reset")]
)
def test_engine_that_breaks_off_is_an_engine_error(classic: Case, error: Exception) -> None:
    def broken(**_: Any) -> Iterator[dict[str, Any]]:
        yield {"stream": "Step 1/2\n"}
        raise error

    classic.engine.build = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="went away"):
        classic.build()


def test_engine_that_does_not_answer_is_an_engine_error(classic: Case) -> None:
    def broken(_: str) -> dict[str, Any]:
        raise DockerException("no socket")

    classic.engine.inspect_image = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="does not answer"):
        classic.build()


def test_image_that_went_to_another_engine_is_noticed(case: Case) -> None:
    case.engine.keeps = False
    with pytest.raises(EngineError, match="has no image"):
        case.build()


def test_inputs_that_cannot_be_used_build_nothing(case: Case) -> None:
    with pytest.raises(PolicyError):
        case.build(spec=opencode(ca_certificates=(b"no certificate",)))
    assert (case.engine.builds, case.engine.commands) == ([], [])
    assert not case.directory.exists()


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("No system certificates available. Try installing ca-certificates.", "build.ca_certificates"),
        ("npm ERR! code SELF_SIGNED_CERT_IN_CHAIN", "build.ca_certificates"),
        ("E: Failed to fetch x  Temporary failure resolving 'deb.example'", "build.proxy"),
        (
            "opencode-linux-x64-1.tgz: FAILED / sha512sum: WARNING: 1 computed checksum did NOT match",
            "something else",
        ),
        ("E: Unable to locate package nosuch", "no such package"),
    ],
)
def test_common_failures_have_a_fix(line: str, fix: str) -> None:
    assert fix in hint_for(["before", line, "after"], "log")
    assert hint_for(["all is well"], "log") == "log"
