"""The Dockerfiles that are kept as text. To accept a change: python -m tests.unit.agent_image.goldens"""

from __future__ import annotations

from pathlib import Path

from agent_image.dockerfile import render
from agent_image.foreign import Foreign
from agent_image.spec import ImageSpec
from policy.profiles import BakedFile, get, names

DIRECTORY = Path(__file__).parent / "golden"
OPENCODE = get("opencode")

# Two certificates of authorities that exist nowhere; CERTIFICATE is the first of them.
CERTIFICATES = (Path(__file__).parent / "authorities.pem").read_bytes()
CERTIFICATE = CERTIFICATES.split(b"-----END CERTIFICATE-----")[0] + b"-----END CERTIFICATE-----\n"


def opencode(**changes: object) -> ImageSpec:
    """Return the spec of the opencode profile for uid and gid 1000, with changes."""
    inputs: dict[str, object] = {
        "uid": 1000,
        "gid": 1000,
        "architecture": "amd64",
        "packages": OPENCODE.debian_packages,
        "owned_dirs": OPENCODE.owned_dirs,
        "baked_files": OPENCODE.baked_files(OPENCODE.parse_options({})),
    }
    return ImageSpec(**{**inputs, **changes})  # type: ignore[arg-type]


SPECS = {
    "opencode": opencode(),
    "corporate": opencode(
        uid=4242,
        gid=20,
        architecture="arm64",
        base="registry.example:5000/team/debian:12@sha256:" + "0" * 64,
        packages=("make", "ripgrep=13.0.0-4+b2"),
        ca_certificates=(CERTIFICATES,),
        apt_mirror="https://mirror.example/debian/",
        npm_registry="https://mirror.example/npm/",
        pip_index="https://mirror.example/simple",
        baked_files=(BakedFile("/etc/opencode/opencode.json", "{}\n"),),
    ),
}


SPECS["existing"] = opencode(
    ca_certificates=(CERTIFICATES,),
    foreign=Foreign(
        "registry.example:5000/team/tools:3",
        "sha256:" + "1" * 64,
        "corral/demo-0a0b0c0d:base",
        ("/usr/local/go/bin",),
        ("LD_PRELOAD", "PYTHONPATH"),
    ),
)


def of_profile(name: str, **given: object) -> ImageSpec:
    """Return the spec of a profile as a policy without options, or with these, has it."""
    options = get(name).parse_options(given)
    profile = get(name).shaped(options)
    return ImageSpec(
        uid=1000,
        gid=1000,
        architecture="amd64",
        harness=name,
        packages=profile.debian_packages,
        lines=profile.image_lines,
        owned_dirs=profile.owned_dirs,
        baked_files=profile.baked_files(options),
    )


SPECS |= {name: of_profile(name) for name in names() if name not in {"opencode", "generic"}}
SPECS["generic"] = of_profile(
    "generic", image=["RUN install-the-tool \\\n    --all", "ENV TOOL=1"], packages=["make"]
)


def main() -> None:
    """Write every golden anew."""
    for name, spec in SPECS.items():
        (DIRECTORY / f"{name}.Dockerfile").write_text(render(spec))


if __name__ == "__main__":
    main()
