"""A small deterministic model server (OpenAI chat completions, streamed or not). Stdlib only, runs in the box.

It answers a conversation that holds N tool results with the N-th scripted shell command, and after the last one
with a final text. ``script.json`` beside it lists the commands.
"""

import http.server
import json
import pathlib
import sys
import threading

SCRIPT = json.loads((pathlib.Path(__file__).parent / "script.json").read_text())
FINAL = "All steps are done."


def reply(messages):
    """Return the assistant's next message for a conversation."""
    done = sum(message.get("role") == "tool" for message in messages)
    if done >= len(SCRIPT):
        return {"role": "assistant", "content": FINAL}
    arguments = {"command": SCRIPT[done]["command"], "description": SCRIPT[done]["what"]}
    call = {
        "index": 0,
        "id": f"call_{done}",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps(arguments)},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_words):
        pass

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = reply(body["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "chatcmpl-demo", "created": 0, "model": "demo"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self.answer({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        chunks = [
            {"index": 0, "delta": message, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": finish},
        ]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for choice in chunks:
            self.event({**head, "object": "chat.completion.chunk", "choices": [choice]})
        self.event({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body):
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print("ready", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    server.shutdown()
