"""A harness in a sandbox asks a real model that the host serves, and passes on what it says."""

from __future__ import annotations

import re

from tests.lab import Lab
from tests.models import tiny

from .host import Host
from .test_harnesses import Harness, project_of

QUESTION = "What is the capital of France?"
# Two processors read some ten words of a prompt a second when everything else is busy, too.
PATIENCE = 550
# The model is given what it can read in that time: none of the harness's tools, which it cannot use.
OPENCODE = """{config: {model: lab/tiny, agent: {build: {prompt: "Answer in one sentence.", tools: {"*": false}}},
  provider: {lab: {npm: "@ai-sdk/openai-compatible", name: lab,
    options: {baseURL: "http://corral-host:PORT/v1", apiKey: "{env:OPENAI_API_KEY}"},
    models: {tiny: {name: tiny, limit: {context: 32768, output: 256}}}}}}}"""
HARNESS = Harness("opencode", "OPENAI_API_KEY", OPENCODE, "chat", "", port=tiny.PORT)


def test_a_harness_answers_from_a_real_model_on_this_host(lab: Lab, host: Host) -> None:
    with project_of(host, HARNESS) as project:
        with tiny.serving(lab.box, lab.name) as log:
            done = project.inside(*HARNESS.one_shot(QUESTION), check=False, timeout=PATIENCE)
            print(done.stdout[-2000:])
            assert done.returncode == 0, done.stdout + done.stderr
            # What it says of it is its own.
            assert "France" in done.stdout
            # It was this server that said so.
            assert re.search(r"stop processing: n_tokens = [1-9]", log.read_text())
        # The control: nobody else could have.
        refused = project.inside(*HARNESS.one_shot(QUESTION), check=False)
        assert refused.returncode == 1
        assert str(tiny.PORT) in refused.stderr, refused.stderr
