from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agent_image import dockerfile
from agent_image.archive import executable
from agent_image.dockerfile import render
from agent_image.harnesses import artifact, client
from tests.unit.agent_image.goldens import CERTIFICATE, DIRECTORY, SPECS, opencode


def instructions(text: str) -> list[str]:
    joined = text.replace("\\\n", "")
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_rendered_text_equals_the_golden(name: str) -> None:
    golden = (DIRECTORY / f"{name}.Dockerfile").read_text()
    assert render(SPECS[name]) == golden, "if that is wanted: python -m tests.unit.agent_image.goldens"


@pytest.mark.parametrize("name", sorted(SPECS))
def test_only_instructions_of_the_classic_builder_are_used(name: str) -> None:
    known = {"FROM", "USER", "ENV", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"}
    known |= {"SHELL", "HEALTHCHECK", "STOPSIGNAL"}
    for line in instructions(render(SPECS[name])):
        word, _, rest = line.partition(" ")
        assert word in known
        options = re.findall(r"^--[a-z-]+", rest)
        assert options in ([], ["--from"]), line
        assert "<<" not in rest


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_run_is_valid_shell(name: str) -> None:
    runs = [line.removeprefix("RUN ") for line in instructions(render(SPECS[name])) if line.startswith("RUN")]
    assert len(runs) == 5
    for script in runs:
        done = subprocess.run(["/bin/sh", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_no_syntax_line_asks_a_registry_for_a_frontend() -> None:
    assert not re.search(r"^#\s*syntax", render(opencode()), re.MULTILINE | re.IGNORECASE)


def test_hash_is_checked_before_the_tarball_is_unpacked() -> None:
    text = render(opencode())
    program = artifact("opencode", "amd64")
    assert program is not None
    fetched, checked, unpacked = (
        text.index(piece) for piece in ("npm-cli.js pack", "sha512sum -c", "tar -x")
    )
    assert fetched < checked < unpacked
    assert f"echo '{program.sha512}  {program.tarball}' | sha512sum -c -" in text
    assert "--ignore-scripts" in text


def test_npm_client_is_pinned_by_hash_for_the_architecture() -> None:
    for architecture in ("amd64", "arm64"):
        text = render(opencode(architecture=architecture))
        assert f"echo '{client(architecture).requirement}' > client.txt" in text
    assert "--require-hashes --only-binary :all:" in text
    assert client("amd64").requirement != client("arm64").requirement


def test_no_address_of_a_registry_is_written_unless_given() -> None:
    assert "://" not in render(opencode(ca_certificates=(CERTIFICATE,)))


def test_only_the_program_leaves_the_stage_that_has_npm() -> None:
    final = render(opencode()).split("\nFROM trust\n")[1]
    assert re.findall(r"COPY --from=\S+ \S+ \S+", final) == ["COPY --from=harness /out/ /usr/local/bin/"]
    assert "npm" not in final
    assert "node" not in final


def test_set_id_bits_are_cleared_in_the_layer_that_brought_them_and_looked_for_again_at_the_end() -> None:
    lines = instructions(render(opencode()))
    packages = next(line for line in lines if "ripgrep" in line)
    assert packages.index("install -y") < packages.index("chmod ug-s") < packages.index("left=$(find")
    last_run = [line for line in lines if line.startswith("RUN")][-1]
    assert "find / -xdev -perm /6000" in last_run
    assert lines.index(last_run) > lines.index("COPY root/ /")


def test_nothing_runs_as_root_by_default() -> None:
    lines = instructions(render(opencode(uid=4242, gid=4343)))
    assert [line for line in lines if line.startswith("USER")] == ["USER root", "USER 4242:4343"]


def test_without_certificates_nothing_is_copied_or_set_for_them() -> None:
    text = render(opencode())
    assert "certificates/" not in text
    assert "SSL_CERT_FILE" not in text


def test_given_certificates_are_trusted_before_the_first_package_is_fetched() -> None:
    text = render(opencode(ca_certificates=(CERTIFICATE,)))
    assert text.index("COPY certificates/") < text.index("apt-get")
    for line in text.splitlines():
        if "apt-get -q" in line:
            assert "CaInfo=/tmp/corral-trust.pem" in line
        if "update-ca-certificates" in line:
            break
    for variable in ("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        assert f"{variable}=/etc/ssl/certs/ca-certificates.crt" in text.split("\nFROM trust\n")[1]


def test_options_of_the_hosts_apt_are_given_to_every_call() -> None:
    text = render(opencode(apt_options=(("Acquire::Check-Valid-Until", "false"),)))
    calls = [line for line in text.splitlines() if "apt-get -qq" in line]
    assert len(calls) == 6
    assert all(" -o Acquire::Check-Valid-Until=false " in line for line in calls)


def test_archive_that_cannot_be_reached_ends_the_build() -> None:
    for spec in (opencode(), opencode(ca_certificates=(CERTIFICATE,))):
        updates = [line for line in render(spec).splitlines() if re.search(r"apt-get .*update;", line)]
        assert len(updates) == 3
        assert all(" -o APT::Update::Error-Mode=any update;" in line for line in updates)


SOURCES = """\
deb http://deb.example/debian bookworm main
deb [signed-by=/usr/share/keyrings/a.gpg] https://deb.example/debian/ bookworm-updates main
deb http://security.example/debian-security bookworm-security main
deb http://other.example/tools stable main
"""
DEB822 = """\
Types: deb
URIs: http://deb.example/debian
Suites: bookworm
"""


def rewritten(text: str, sources: str) -> str:
    script = next(line for line in text.splitlines() if "sources.list.d" in line)
    edits = re.findall(r"-e ('[^']*')", script)
    assert edits
    command = "sed -E " + " ".join(f"-e {edit}" for edit in edits)
    argv = ["/bin/sh", "-c", command]
    return subprocess.run(argv, input=sources, text=True, capture_output=True, check=True).stdout


def test_mirror_replaces_the_archives_in_both_forms_of_source_lists() -> None:
    text = render(opencode(apt_mirror="https://mirror.example/debian/"))
    assert rewritten(text, SOURCES) == (
        "deb https://mirror.example/debian/ bookworm main\n"
        "deb [signed-by=/usr/share/keyrings/a.gpg] https://mirror.example/debian/ bookworm-updates main\n"
        "deb https://mirror.example/debian-security bookworm-security main\n"
        "deb http://other.example/tools stable main\n"
    )
    assert rewritten(text, DEB822) == DEB822.replace(
        "http://deb.example/debian", "https://mirror.example/debian/"
    )


def test_security_archive_can_have_a_mirror_of_its_own() -> None:
    text = render(opencode(apt_security_mirror="https://mirror.example/sec"))
    assert "https://mirror.example/sec bookworm-security" in rewritten(text, SOURCES)
    assert "http://deb.example/debian bookworm main" in rewritten(text, SOURCES)


def user_step(uid: int, gid: int, passwd: str, group: str, tmp_path: object) -> tuple[str, str]:
    script = next(line for line in instructions(render(opencode(uid=uid, gid=gid))) if "/etc/passwd" in line)
    commands = [part.strip() for part in script.removeprefix("RUN set -eu;").split(";")]
    wanted = [command for command in commands if "/etc/passwd" in command or "/etc/group" in command]
    (tmp_path / "passwd").write_text(passwd)
    (tmp_path / "group").write_text(group)
    shell = "set -eu; " + "; ".join(wanted).replace("/etc/", f"{tmp_path}/")
    subprocess.run(["/bin/sh", "-c", shell], check=True)
    return (tmp_path / "passwd").read_text(), (tmp_path / "group").read_text()


def test_ids_that_the_base_gave_away_become_the_agents(tmp_path) -> None:
    passwd, group = user_step(
        1000,
        20,
        "root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/bash\nuser:x:10000:1000::/:/bin/sh\n",
        "root:x:0:\ndialout:x:20:\nnode:x:1000:\n",
        tmp_path,
    )
    assert passwd.splitlines() == [
        "root:x:0:0:root:/root:/bin/bash",
        "user:x:10000:1000::/:/bin/sh",
        "agent:*:1000:20:agent:/home/agent:/bin/bash",
    ]
    assert group.splitlines() == ["root:x:0:", "node:x:1000:", "agent:*:20:"]


def test_an_agent_of_the_base_is_replaced(tmp_path) -> None:
    passwd, group = user_step(
        1000,
        1000,
        "root:x:0:0:root:/root:/bin/bash\nagent:x:500:500::/srv:/bin/sh\n",
        "root:x:0:\nagent:x:500:\nagents:x:501:agent\n",
        tmp_path,
    )
    assert passwd.count("agent:*:1000:1000:") == 1
    assert ":500:" not in passwd
    assert group.splitlines() == ["root:x:0:", "agents:x:501:agent", "agent:*:1000:"]


def test_what_the_users_lines_install_loses_its_privileges_and_corrals_files_come_after() -> None:
    text = render(SPECS["generic"])
    at = [text.index(piece) for piece in ("RUN install-the-tool", "ENV TOOL=1", "COPY root/ /")]
    assert at == sorted(at)
    assert "chmod ug-s" in text[at[1] : at[2]]
    assert "FROM trust AS harness" not in text and "COPY --from" not in text


def test_an_existing_image_has_its_harness_in_directories_of_roots() -> None:
    text = render(opencode(harness="claude", foreign=SPECS["existing"].foreign))
    line = next(line for line in text.splitlines() if "corral-prepare 1000" in line)
    assert line.split()[-3:] == ["/usr/local/lib", "/usr/local/lib/claude;", "\\"]
    assert "COPY --from=harness /out/ /usr/local/lib/claude/" in text


def test_a_processor_without_avx2_gets_another_tarball() -> None:
    assert "opencode-linux-x64-baseline@" in render(opencode(baseline=True))
    assert "baseline" not in render(opencode())


def test_python_packages_are_installed_from_what_the_context_pins() -> None:
    text = render(SPECS["aider"])
    assert text.index("COPY requirements.txt") < text.index("--require-hashes")
    assert "npm" not in text.split("npm_config_update_notifier=false")[1].split("\nFROM trust\n")[0]
    assert " = 3.11 ]" in text


@pytest.mark.parametrize("python", [sys.executable, "/bin/false"])
def test_the_entrypoint_is_compiled_where_that_can_be_done(tmp_path: Path, python: str) -> None:
    program, place = tmp_path / "corral-entrypoint", tmp_path / "compiling"
    program.write_bytes(executable("entrypoint"))
    program.chmod(0o755)
    command = dockerfile._compiled().replace(dockerfile.ENTRYPOINT, str(program))
    command = command.replace(dockerfile.COMPILING, str(place)).replace("/usr/bin/python3", python)
    subprocess.run(["sh", "-euc", command], check=True, capture_output=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == [program.name]
    assert program.stat().st_mode & 0o777 == 0o755
    if python == "/bin/false":
        assert program.read_bytes() == executable("entrypoint")
        return
    assert program.read_bytes().startswith(f"#!{python} -IS\n".encode())
    with zipfile.ZipFile(program) as archive:
        names = set(archive.namelist())
    assert {"__main__.py", "entrypoint/main.py", "entrypoint/main.pyc"} <= names
    code = f"import sys; sys.path[:0] = [{str(program)!r}]; from entrypoint import main; print(main.__file__)"
    found = subprocess.run(
        [sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == f"{program}/entrypoint/main.pyc"
