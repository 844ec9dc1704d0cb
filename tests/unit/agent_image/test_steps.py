"""What builders print, read as steps."""

from __future__ import annotations

import itertools

import pytest

from agent_image.steps import BEGAN, CACHED, DONE, FAILED, Step, Steps, named

BUILDKIT = """\
#0 building with "default" instance using docker driver
#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 2.1kB done
#1 DONE 0.0s
#2 [internal] load metadata for docker.io/library/debian:bookworm-slim
#2 DONE 0.8s
#3 [base 1/2] FROM docker.io/library/debian:bookworm-slim@sha256:aa
#3 DONE 0.0s
#4 [base 2/2] RUN set -eu; apt-get install --no-install-recommends git
#4 0.210 Get:1 git
#3 sha256:bb 10MB / 20MB 1.0s
#3 ...
#4 DONE 12.5s
#3 extracting sha256:bb 0.4s done
#3 DONE 2.5s
#5 [stage-1 2/3] COPY files /usr/local
#5 CACHED
#6 [stage-1 3/3] RUN set -eu; mkdir -p /fetch /out; npm pack x
#6 ERROR: process "/bin/sh" did not complete successfully: exit code: 1
#7 exporting to image
#7 CANCELED
"""
CLASSIC = """\
Sending build context to Docker daemon  12kB
Step 1/4 : FROM debian:bookworm-slim
 ---> 0123456789ab
Step 2/4 : RUN set -eu; apt-get install --no-install-recommends git
 ---> Using cache
 ---> 1123456789ab
Step 3/4 : RUN set -eu; mkdir -p /fetch /out; npm pack x
 ---> Running in 2123456789ab
 ---> Using cache
Step 4/4 : LABEL x=y
 ---> 3123456789ab
"""


def told(text: str, *, failed: bool = False) -> list[tuple[str, str, float]]:
    steps = Steps(clock=itertools.count().__next__)  # a second between any two looks
    events = [event for line in text.splitlines() for event in steps.line(line)]
    events += steps.finish(failed=failed)
    return [(event.step.title, event.what, event.seconds) for event in events if not event.step.minor]


def test_buildkit_s_numbers_are_steps_with_the_seconds_it_tells() -> None:
    base = "base image debian:bookworm-slim"
    assert told(BUILDKIT) == [
        ("looking up debian:bookworm-slim", BEGAN, 0),
        ("looking up debian:bookworm-slim", DONE, 0.8),
        (base, BEGAN, 0),
        (base, DONE, 0),
        ("packages", BEGAN, 0),
        # It was looked at first, and is fetched now.
        (base, BEGAN, 0),
        ("packages", DONE, 12.5),
        (base, DONE, 2.5),
        ("COPY files /usr/local", BEGAN, 0),
        ("COPY files /usr/local", CACHED, 0),
        ("harness", BEGAN, 0),
        ("harness", FAILED, pytest.approx(1, abs=5)),
        ("writing the image", BEGAN, 0),
    ]


def test_the_classic_builder_goes_from_step_to_step_and_what_a_program_prints_is_no_word_of_its() -> None:
    found = told(CLASSIC)
    assert [(title, what) for title, what, _ in found] == [
        ("base image debian:bookworm-slim", BEGAN),
        ("base image debian:bookworm-slim", DONE),
        ("packages", BEGAN),
        ("packages", CACHED),
        ("harness", BEGAN),
        ("harness", DONE),
    ]
    assert all(seconds >= 1 for _, what, seconds in found if what == DONE)


def test_of_a_classic_build_that_ends_the_step_it_was_at_failed() -> None:
    until_third = CLASSIC.partition("Step 4/4")[0]
    assert [row[:2] for row in told(until_third, failed=True)][-1] == ("harness", FAILED)


def test_what_no_builder_prints_is_no_step() -> None:
    assert told("hello\n#x\nStep one\n") == []


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("[internal] load .dockerignore", Step("[internal] load .dockerignore", minor=True)),
        ("FROM trust AS harness", Step("FROM trust AS harness", minor=True)),
        ("USER 1000:1000", Step("USER 1000:1000", minor=True)),
        ("[stage-1 2/9] RUN  make   it", Step("RUN make it")),
        ("exporting to image", Step("writing the image")),
    ],
)
def test_steps_are_called_what_they_are_to_a_user(text: str, step: Step) -> None:
    assert named(text) == step
