"""A real local HTTP server that speaks the OpenAI chat protocol; a test says what it answers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Pieces(NamedTuple):
    """A reply that is sent piece by piece where the request asks for a stream.

    Attributes:
        texts: The pieces; one that is a dict is sent as it is.
        pause: Seconds before each.
        reason: Why it ended; None: the connection breaks off instead.
    """

    texts: Sequence[str | dict[str, Any]]
    pause: float = 0.0
    reason: str | None = "stop"


#: From a request's JSON body to a reply's text, a (text, finish_reason) pair, its pieces, raw bytes, an HTTP status, or
#: one with what the error says or its raw body. A text is streamed by words where the request asks for it.
Answer = Callable[[dict[str, Any]], "str | tuple[str | None, str] | Pieces | bytes | int | tuple[int, str | bytes]"]


class Stub:
    """What the server saw."""

    def __init__(self, answer: Answer, delay: float) -> None:
        self.answer, self.delay = answer, delay
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = self._now = 0
        self.given_up = threading.Event()  # a client went away while its reply was written
        self._lock = threading.Lock()
        self.url = ""

    def serve(self, body: dict[str, Any], key: str) -> tuple[int, bytes | Iterator[bytes]]:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        time.sleep(self.delay)
        try:
            answer = self.answer(body)
        finally:
            with self._lock:
                self._now -= 1
        if isinstance(answer, bytes):
            return 200, answer
        if isinstance(answer, int):
            answer = (answer, f"no, {key}")
        if isinstance(answer, tuple) and isinstance(answer[0], int):
            status, said = answer
            error = {"error": {"message": said, "type": "stub"}}
            return status, said if isinstance(said, bytes) else json.dumps(error).encode()
        if body.get("stream"):
            return 200, _events(answer)
        if isinstance(answer, Pieces):
            answer = "".join(map(str, answer.texts)), str(answer.reason)
        text, reason = answer if isinstance(answer, tuple) else (answer, "stop")
        message = {"role": "assistant", "content": text}
        completion = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        }
        return 200, json.dumps(completion).encode()


def _events(answer: str | tuple[str | None, str] | Pieces) -> Iterator[bytes]:
    """Yield the server-sent events of a reply; they end without a last one where it breaks off."""
    if isinstance(answer, Pieces):
        pieces = answer
    else:
        text, reason = answer if isinstance(answer, tuple) else (answer, "stop")
        pieces = Pieces(re.findall(r"\s*\S+|\s+$", text or ""), reason=reason)

    def event(said: dict[str, Any]) -> bytes:
        return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'created': 0, **said})}\n\n".encode()

    def choice(delta: dict[str, str], why: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": why}]}

    yield event(choice({"role": "assistant", "content": ""}))
    for piece in pieces.texts:
        time.sleep(pieces.pause)
        yield event(piece if isinstance(piece, dict) else choice({"content": piece}))
    if pieces.reason is None:
        raise ConnectionAbortedError
    yield event(choice({}, pieces.reason))
    yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}})
    yield b"data: [DONE]\n\n"


@contextmanager
def serving(
    answer: Answer, delay: float = 0.0, models: Sequence[str] | bytes | None = None, context: int | None = None
) -> Iterator[Stub]:
    """Serve; with models (names, or a raw body) it lists them, with the length of their context."""
    stub = Stub(answer, delay)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if models is None or self.path != "/v1/models":
                self.send_error(404)
                return
            rows = [] if isinstance(models, bytes) else [{"id": name, "max_model_len": context} for name in models]
            content = models if isinstance(models, bytes) else json.dumps({"object": "list", "data": rows}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = self.path == "/v1/chat/completions"
            status, content = stub.serve(body, self.headers["Authorization"]) if found else (404, b"{}")
            if not isinstance(content, bytes):
                self.stream(content)
                return
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Retry-After-Ms", "5")
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):  # the client was killed
                pass

        def stream(self, events: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in events:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionAbortedError:
                self.close_connection = True
            except (BrokenPipeError, ConnectionResetError):
                stub.given_up.set()
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
