"""A server in a process of its own that is fuzzed, and the malformed HTTP that is sent to it."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

ROOT = Path(__file__).parents[2]
# The allocator's pools, one for each of many threads, grow in jumps that would hide what leaks.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
PATIENCE = 0.5  # seconds of silence until nothing more is expected


class Child(NamedTuple):
    """A server that runs.

    Attributes:
        url: Its address.
        pid: Its process.
        log: What it wrote.
    """

    url: str
    pid: int
    log: Path

    @property
    def memory(self) -> float:
        """Resident MiB."""
        (pages,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return int(pages) / 1024


@contextmanager
def running(folder: Path, **keys: Any) -> Iterator[Child]:
    """Run ``mia-serve serve``; the keys are those of its configuration."""
    path, log = folder / "serve.yaml", folder / "log.txt"
    path.write_text(yaml.safe_dump({"port": 0, "data": str(folder / "collections"), "drain_s": 2} | keys))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mia_serve", "serve", str(path)],
            stderr=output,
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT,
        )
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        while True:
            try:
                if httpx.get(found.group() + "/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield Child(found.group(), process.pid, log)
        assert process.poll() is None, "the server has died"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send(url: str, data: bytes, close: bool = True) -> bytes:
    """Send bytes over a socket of their own, and return all that comes back until the server hangs up or falls silent.

    Args:
        url: Of the server.
        data: What is sent.
        close: Whether the sending side is closed afterwards, which tells the server that no more comes.
    """
    host, port = url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        with suppress(OSError):  # it may hang up before it has read all
            connection.sendall(data)
            if close:
                connection.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer


def statuses(answer: bytes) -> list[int]:
    """Return the status of every response in an answer."""
    return [int(found) for found in re.findall(rb"(?:^|(?<=[\n}\]]))HTTP/1\.[01] (\d{3})", answer)]


def post(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """Return a whole request whose body may be anything."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def malformed() -> Iterator[tuple[str, bytes]]:
    """Yield what is no HTTP, or just so, each with a name."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    good = b'{"model": "e1", "input": "a"}'
    noise = random.Random(6)
    for i in range(20):
        yield f"noise {i}", noise.randbytes(noise.randrange(1, 5000))
        yield f"noise {i} after a request line", b"GET /health HTTP/1.1\r\n" + noise.randbytes(200) + b"\r\n\r\n"
    yield "a TLS hello", bytes.fromhex("16030100c8010000c40303") + noise.randbytes(190)
    yield "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
    for line in (
        b"GET\r\n", b"GET /health\r\n", b"GET /health HTTP/9.9\r\n", b"get /health HTTP/1.1\r\n", b"\r\n\r\n\r\n",
        b"FROB /health HTTP/1.1\r\n", b"GET  /health  HTTP/1.1\r\n", b"GET /health HTTP/1.1 x\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"GET /%00 HTTP/1.1\r\n",
        b"GET /\0 HTTP/1.1\r\n",
        b"GET /v1/collections/%ff%fe HTTP/1.1\r\n", b"GET /v1/collections/%ed%a0%80 HTTP/1.1\r\n",
        b"GET /%zz HTTP/1.1\r\n",
        b"GET /v1/collections/..%2f..%2fetc HTTP/1.1\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n",
        b"GET /\xe6\xbd\xae HTTP/1.1\r\n",
        b"GET /page/..%2f..%2f..%2fapp.py HTTP/1.1\r\n", b"GET //health HTTP/1.1\r\n", b"GET ?x HTTP/1.1\r\n",
        b"GET /health#x HTTP/1.1\r\n",
        b"GET /v1/collections/a/chunks?offset=9999999999999999999999&limit=-1 HTTP/1.1\r\n",
        b"TRACE /health HTTP/1.1\r\n",
        b"GET /v1/collections/a/chunks?limit=1e9&offset=%00 HTTP/1.1\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n",
        b"GET /health?" + b"a=b&" * 20_000 + b" HTTP/1.1\r\n", b"HEAD /v1/models HTTP/1.1\r\n",
        b"PATCH /v1/models HTTP/1.1\r\n",
    ):  # fmt: skip
        yield f"line {line[:40]!r}", line + b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
    for name, header in {
        "a header of 1 MiB": b"X: " + b"a" * (1 << 20),
        "10,000 headers": b"\r\n".join(b"X-%d: a" % i for i in range(10_000)),
        "NUL": b"X: a\0b", "no colon": b"nonsense", "no name": b": a", "a space before the colon": b"X : a",
        "folded": b"X: a\r\n b",
        "bytes over 127": b"X-Request-ID: \xff\xfe\xe6", "a long id": b"X-Request-ID: " + b"a" * 9000,
        "no media type": b"Accept: \xff",
        "a key that is none": b"Authorization: Bearer", "another key": b"Authorization: Basic \xff",
        "two": b"Authorization: a\r\nAuthorization: b",
        "WebSocket": b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13",
        "h2c": b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        "elsewhere": b"X-Forwarded-For: \xff, 1\r\nForwarded: for=\"[\"\r\nX-Forwarded-Proto: gopher",
    }.items():  # fmt: skip
        yield f"header, {name}", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header + b"\r\n\r\n"
        yield f"header of a body, {name}", head + header + b"\r\nContent-Length: %d\r\n\r\n" % len(good) + good
    for value in (
        b"-1",
        b"+29",
        b"1e3",
        b"0x1d",
        b"",
        b"29, 29",
        b"9" * 30,
        b"18446744073709551617",
        b" 29 ",
        b"29\r\nContent-Length: 5",
    ):
        yield f"length {value[:20]!r}", head + b"Content-Length: " + value + b"\r\n\r\n" + good
    for length in (0, 5, 28, 30, 4000):
        yield f"length {length} of {len(good)}", head + b"Content-Length: %d\r\n\r\n" % length + good
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for part in (
        b"ZZ\r\n", b"-1\r\n", b"FFFFFFFFFFFFFFFFF\r\nabc", b"5\r\nabc", b"1d\r\n" + good,
        b"1d\r\n" + good + b"\r\n0\r\nX: \0\r\n\r\n",
        b"1d;a=" + b"b" * 100_000 + b"\r\n" + good + b"\r\n0\r\n\r\n", b"0\r\n\r\n",
        b"1\r\n{\r\n" * 3000 + b"0\r\n\r\n", b"1d\n" + good + b"\n0\n\n",
    ):  # fmt: skip
        yield f"chunks {part[:20]!r}", chunked + part
    yield (
        "length and chunks",
        head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n1d\r\n" + good + b"\r\n0\r\n\r\n",
    )
    yield "unknown coding", head + b"Transfer-Encoding: gzip, frob\r\n\r\n" + good
    yield "waits to be told to go on", head + b"Expect: 100-continue\r\nContent-Length: 29\r\n\r\n"
    yield "20 in a row", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20
    yield "a good one, then noise", post("/v1/embeddings", good).replace(b"close", b"keep-alive") + noise.randbytes(500)
    yield "nothing", b""


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies that are no JSON, or odd JSON, each with a name."""
    text = b'{"model": "e1", "input": %s, "query": %s, "documents": [%s], "id": %s, "collection": %s, "question": %s}'

    def everywhere(value: bytes) -> bytes:
        return text % ((value,) * 6)

    yield "empty", b""
    for value in (
        b"null",
        b"true",
        b"[]",
        b"{}",
        b"1",
        b'"a"',
        b"[[[]]]",
        b"{",
        b'{"a"',
        b"{'a': 1}",
        b'{"input": "a",}',
        b"// a\n{}",
    ):
        yield f"body {value!r}", value
    yield "not UTF-8", b'{"model": "e1", "input": "\xff\xfe"}'
    yield "UTF-16", json.dumps({"model": "e1", "input": "a"}).encode("utf-16")
    yield "a byte order mark", b"\xef\xbb\xbf" + json.dumps({"model": "e1", "input": "a"}).encode()
    yield "binary", bytes(range(256)) * 10
    for deep in (100, 5_000, 200_000):
        yield f"lists {deep} deep", everywhere(b"[" * deep + b"]" * deep)
        yield f"objects {deep} deep", everywhere(b'{"a":' * deep + b"1" + b"}" * deep)
        yield f"lists {deep} deep and open", b"[" * deep
    for value in (
        b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1E+400", b"9" * 400, b"1" * 5000, b"0.1", b"-1",
        b"[-1]", b"[9223372036854775808]",
        b"[1.5]", b"[true]", b"[null]", b"[[]]", b"[[0], \"a\"]", b'["a", 1]', b"[[999999999]]", b'""', b'" "',
        b'["", ""]', b'"\\ud800"',
        b'"a\\udc00b"', b'["\\ud83d"]', b'"\\u0000"', b'"a\\u0000b"', b'"\\uffff\\ufdd0"', b'"\\u202e\\u200b"',
        b'"a\tb"', b'{"text": "a"}',
        b'[{"text": 1}]', b'{"a": {"b": []}}', b'"' + b"a" * 300_000 + b'"', b'"' + "潮".encode() * 50_000 + b'"',
        b"[" + b'"",' * 5000 + b'""]',
        b'"../../../etc/passwd"', b'"<|endoftext|>[SEP]<s>"', b"[" + b"0," * 100_000 + b"0]",
        b'"' + b"\\n" * 5000 + b'"',
    ):  # fmt: skip
        yield f"value {value[:24]!r}", everywhere(value)
    yield "a key twice", b'{"model": "e1", "model": "e2", "input": "a", "input": "b"}'
    yield "10,000 keys", json.dumps({"model": "e1", "input": "a"} | {f"k{i}": i for i in range(10_000)}).encode()
    yield "a key of 1 MB", b'{"model": "e1", "input": "a", "' + b"k" * 1_000_000 + b'": 1}'
    yield (
        "a key that is half a character",
        b'{"model": "e1", "input": "a", "\\ud800": 1, "__proto__": {}, "\\u0000": 2}',
    )
    yield "9 MiB", b'{"model": "e1", "input": "' + b"a" * (9 << 20) + b'"}'
