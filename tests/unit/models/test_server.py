from __future__ import annotations

import http.client
import io
import json
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tests.models.server import serve

KEY = "sk-1"
SCRIPT = {"commands": ["true"], "final": "all of it", "plain": "no tools", "key": KEY}
# Of each protocol: path, headers with the key, a conversation without a result, one with, and the offered tool.
TALKS: dict[str, tuple[str, dict[str, str], dict[str, Any], dict[str, Any], Any]] = {
    "chat": (
        "/v1/chat/completions",
        {"Authorization": f"Bearer {KEY}"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"type": "function", "function": {"name": "bash"}},
    ),
    "responses": (
        "/v1/responses",
        {"Authorization": f"Bearer {KEY}"},
        {"input": [{"type": "message"}]},
        {"input": [{"type": "function_call_output"}]},
        {"type": "function", "name": "exec_command"},
    ),
    "messages": (
        "/v1/messages?beta=true",
        {"x-api-key": KEY},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"name": "Bash"},
    ),
    "gemini": (
        "/v1beta/models/m:{stream}",
        {"x-goog-api-key": KEY},
        {"contents": [{"parts": [{"text": "x"}]}]},
        {"contents": [{"parts": [{"functionResponse": {}}]}]},
        {"functionDeclarations": [{"name": "run_shell_command"}]},
    ),
}
EACH = pytest.mark.parametrize("protocol", TALKS)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def port(log: io.StringIO) -> Iterator[int]:
    server = serve(0, SCRIPT, log)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def ask(port: int, protocol: str, body: dict[str, Any], stream: bool, **headers: str) -> tuple[int, str]:
    path, with_key, *_ = TALKS[protocol]
    path = path.replace("{stream}", "streamGenerateContent?alt=sse" if stream else "generateContent")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = body if protocol == "gemini" else {**body, "stream": stream}
    connection.request("POST", path, json.dumps(body), headers or with_key)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def rows(text: str, stream: bool) -> list[Any]:
    """Return the JSON of an answer; of a streamed one, of each event."""
    if not stream:
        return [json.loads(text)]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(row) for row in data if row != "[DONE]"]


@EACH
@STREAMED
def test_a_command_is_called_for_then_the_final_text_said(
    port: int, log: io.StringIO, protocol: str, stream: bool
) -> None:
    _, _, first, second, tool = TALKS[protocol]
    status, called = ask(port, protocol, {**first, "tools": [tool]}, stream)
    assert status == 200
    assert rows(called, stream)
    assert "true" in called and "all of it" not in called
    _, said = ask(port, protocol, {**second, "tools": [tool]}, stream)
    assert rows(said, stream)
    assert "all of it" in said
    _, plain = ask(port, protocol, first, stream)
    assert "no tools" in plain
    noted = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(row["protocol"], row["results"], row["accepted"]) for row in noted] == [
        (protocol, 0, True),
        (protocol, 1, True),
        (protocol, 0, True),
    ]


@EACH
def test_another_key_is_refused_in_the_protocol_s_words(port: int, protocol: str) -> None:
    status, text = ask(port, protocol, TALKS[protocol][2], False, **{"x-api-key": "other"})
    assert status == 401
    assert "not known here" in json.dumps(json.loads(text)["error"])


def test_what_is_none_of_the_protocols_is_not_found(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/other", "{}")
    assert connection.getresponse().status == 404
