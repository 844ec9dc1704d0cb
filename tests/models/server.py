"""A model that says what a script says: chat completions, Responses, Messages and Gemini, streamed or not.

A conversation in which a shell tool is offered and N results of tools stand is answered with the N-th command of
the script, and after the last one with the final text; without such a tool it is answered with ``plain``. Stdlib
only and one file, so that it runs on any host: ``python3 server.py PORT SCRIPT LOG``. It prints ``ready`` and ends
with its standard input. ``SCRIPT`` is a JSON object::

    {"commands": [...], "final": "...", "plain": "...", "key": "..."}

``key``, when there is one, must come with each request. ``LOG`` gets a JSON line for each request.
"""

import http.server
import json
import sys
import threading
import urllib.parse

# The harnesses' shell tools, with what they call the command.
SHELLS = {
    "bash": "command",
    "Bash": "command",
    "shell_command": "command",
    "exec_command": "cmd",
    "run_shell_command": "command",
}
RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})


class Answer:
    """What the model says: a text, or a call of a tool with its arguments."""

    def __init__(self, text="", tool="", arguments=None, number=0):
        self.text, self.tool, self.arguments, self.number = text, tool, arguments or {}, number

    @property
    def ident(self):
        return f"call_{self.number}"


def decide(script, tools, results):
    """Return the answer to a conversation.

    Args:
        script: see the module.
        tools: name of each tool that is offered.
        results: how many results of tools the conversation holds.
    """
    shell = next((name for name in tools if name in SHELLS), None)
    if shell is None:
        return Answer(script.get("plain") or script["final"])
    if results >= len(script["commands"]):
        return Answer(script["final"])
    arguments = {SHELLS[shell]: script["commands"][results]}
    if shell in ("bash", "Bash", "run_shell_command"):
        arguments["description"] = "a step"
    return Answer(tool=shell, arguments=arguments, number=results)


class Chat:
    """OpenAI chat completions."""

    name = "chat"

    @staticmethod
    def tools(body):
        return [tool["function"]["name"] for tool in body.get("tools") or []]

    @staticmethod
    def results(body):
        return sum(message.get("role") == "tool" for message in body["messages"])

    @staticmethod
    def streamed(body, path):
        return bool(body.get("stream"))

    @staticmethod
    def whole(body, answer):
        head = {
            "id": "chatcmpl-1",
            "created": 0,
            "model": body.get("model", "m"),
            "object": "chat.completion",
        }
        choice = {
            "index": 0,
            "message": _chat(answer),
            "finish_reason": "tool_calls" if answer.tool else "stop",
        }
        return {
            **head,
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    @classmethod
    def events(cls, body, answer):
        whole = cls.whole(body, answer)
        head = {**whole, "object": "chat.completion.chunk"}
        choice = whole["choices"][0]
        for delta, finish in ((choice["message"], None), ({}, choice["finish_reason"])):
            yield (
                None,
                {**head, "usage": None, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]},
            )
        yield None, {**head, "choices": []}
        yield None, "[DONE]"

    @staticmethod
    def error(text):
        return {"error": {"message": text, "type": "invalid_request_error", "code": "invalid_api_key"}}


def _chat(answer):
    if not answer.tool:
        return {"role": "assistant", "content": answer.text}
    function = {"name": answer.tool, "arguments": json.dumps(answer.arguments)}
    call = {"index": 0, "id": answer.ident, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Responses:
    """OpenAI Responses."""

    name = "responses"

    @staticmethod
    def tools(body):
        return [tool.get("name", "") for tool in body.get("tools") or []]

    @staticmethod
    def results(body):
        items = body["input"] if isinstance(body["input"], list) else []
        return sum(item.get("type") in RESULTS for item in items)

    @staticmethod
    def streamed(body, path):
        return bool(body.get("stream"))

    @staticmethod
    def whole(body, answer):
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        usage["input_tokens_details"] = {"cached_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        head = {"id": "resp_1", "object": "response", "created_at": 0, "model": body.get("model", "m")}
        return {**head, "status": "completed", "output": [_item(answer)], "usage": usage}

    @classmethod
    def events(cls, body, answer):
        whole = cls.whole(body, answer)
        item = whole["output"][0]
        started = {**whole, "status": "in_progress", "output": [], "usage": None}
        rows = [("response.created", {"response": started})]
        empty = {"content": []} if not answer.tool else {"arguments": ""}
        rows.append(
            (
                "response.output_item.added",
                {"output_index": 0, "item": {**item, "status": "in_progress", **empty}},
            )
        )
        at = {"item_id": item["id"], "output_index": 0}
        if answer.tool:
            rows.append(("response.function_call_arguments.delta", {**at, "delta": item["arguments"]}))
            rows.append(("response.function_call_arguments.done", {**at, "arguments": item["arguments"]}))
        else:
            part = item["content"][0]
            rows.append(
                ("response.content_part.added", {**at, "content_index": 0, "part": {**part, "text": ""}})
            )
            rows.append(("response.output_text.delta", {**at, "content_index": 0, "delta": answer.text}))
            rows.append(("response.output_text.done", {**at, "content_index": 0, "text": answer.text}))
            rows.append(("response.content_part.done", {**at, "content_index": 0, "part": part}))
        rows.append(("response.output_item.done", {"output_index": 0, "item": item}))
        rows.append(("response.completed", {"response": whole}))
        for number, (kind, fields) in enumerate(rows):
            yield kind, {"type": kind, "sequence_number": number, **fields}

    error = Chat.error


def _item(answer):
    if answer.tool:
        call = {
            "type": "function_call",
            "id": f"fc_{answer.number}",
            "call_id": answer.ident,
            "status": "completed",
        }
        return {**call, "name": answer.tool, "arguments": json.dumps(answer.arguments)}
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


class Messages:
    """Anthropic Messages."""

    name = "messages"

    @staticmethod
    def tools(body):
        return [tool.get("name", "") for tool in body.get("tools") or []]

    @staticmethod
    def results(body):
        contents = [
            message["content"] for message in body["messages"] if isinstance(message["content"], list)
        ]
        return sum(block.get("type") == "tool_result" for content in contents for block in content)

    @staticmethod
    def streamed(body, path):
        return bool(body.get("stream"))

    @staticmethod
    def whole(body, answer):
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model", "m")}
        block = {"type": "text", "text": answer.text}
        if answer.tool:
            block = {
                "type": "tool_use",
                "id": f"toolu_{answer.number}",
                "name": answer.tool,
                "input": answer.arguments,
            }
        end = {"stop_reason": "tool_use" if answer.tool else "end_turn", "stop_sequence": None}
        return {**head, "content": [block], **end, "usage": {"input_tokens": 1, "output_tokens": 1}}

    @classmethod
    def events(cls, body, answer):
        whole = cls.whole(body, answer)
        block = whole["content"][0]
        delta = {"type": "text_delta", "text": answer.text}
        if answer.tool:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(answer.arguments)}
        empty = {**block, "input": {}} if answer.tool else {**block, "text": ""}
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        for kind, fields in (
            ("message_start", {"message": {**whole, "content": [], "stop_reason": None}}),
            ("content_block_start", {"index": 0, "content_block": empty}),
            ("content_block_delta", {"index": 0, "delta": delta}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": end, "usage": {"output_tokens": 1}}),
            ("message_stop", {}),
        ):
            yield kind, {"type": kind, **fields}

    @staticmethod
    def error(text):
        return {"type": "error", "error": {"type": "authentication_error", "message": text}}


class Gemini:
    """Gemini's generateContent."""

    name = "gemini"

    @staticmethod
    def tools(body):
        rows = [row for tool in body.get("tools") or [] for row in tool.get("functionDeclarations") or []]
        return [row["name"] for row in rows]

    @staticmethod
    def results(body):
        return sum(
            "functionResponse" in part for content in body["contents"] for part in content.get("parts") or []
        )

    @staticmethod
    def streamed(body, path):
        return ":stream" in path

    @staticmethod
    def whole(body, answer):
        part = {"text": answer.text}
        if answer.tool:
            part = {"functionCall": {"name": answer.tool, "args": answer.arguments}}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}

    @classmethod
    def events(cls, body, answer):
        yield None, cls.whole(body, answer)

    @staticmethod
    def error(text):
        return {"error": {"code": 401, "message": text, "status": "UNAUTHENTICATED"}}


def protocol(path):
    """Return which protocol a request's path belongs to; None when to none."""
    plain = urllib.parse.urlsplit(path).path
    for end, found in (("/chat/completions", Chat), ("/responses", Responses), ("/messages", Messages)):
        if plain.endswith(end):
            return found
    return Gemini if "enerateContent" in plain else None


def key_of(headers, path):
    """Return the credential of a request, wherever its protocol puts it; empty when there is none."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
    bearer = headers.get("Authorization", "")
    return (
        headers.get("x-api-key")
        or headers.get("x-goog-api-key")
        or bearer.removeprefix("Bearer ")
        or query.get("key", [""])[0]
    )


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    script = None
    log_file = None

    def log_message(self, *_words):
        pass

    def note(self, **fields):
        line = json.dumps({"method": self.command, "path": self.path, **fields})
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def do_HEAD(self):
        self.note()
        self.answer(200, {})

    def do_GET(self):
        self.note()
        models = [{"id": "demo", "object": "model", "created": 0, "owned_by": "lab"}]
        self.answer(200, {"object": "list", "data": models})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        spoken = protocol(self.path)
        if spoken is None:
            self.note()
            self.answer(404, {"error": {"message": "there is nothing here"}})
            return
        body = json.loads(raw)
        key, tools = key_of(self.headers, self.path), spoken.tools(body)
        wanted = self.script.get("key")
        accepted = not wanted or key == wanted
        self.note(protocol=spoken.name, tools=tools, results=spoken.results(body), accepted=accepted)
        if not accepted:
            self.answer(401, spoken.error("this key is not known here"))
            return
        found = decide(self.script, tools, spoken.results(body))
        if not spoken.streamed(body, self.path):
            self.answer(200, spoken.whole(body, found))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for kind, fields in spoken.events(body, found):
            data = fields if isinstance(fields, str) else json.dumps(fields)
            self.wfile.write(((f"event: {kind}\n" if kind else "") + f"data: {data}\n\n").encode())
            self.wfile.flush()
        self.close_connection = True

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def serve(port, script, log, address="127.0.0.1"):
    """Return a server, on loopback, whose requests are answered in threads."""
    handler = type("Bound", (Handler,), {"script": script, "log_file": log})
    return http.server.ThreadingHTTPServer((address, port), handler)


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as source, open(sys.argv[3], "a", encoding="utf-8") as target:
        server = serve(int(sys.argv[1]), json.load(source), target)
        print("ready", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        server.shutdown()
