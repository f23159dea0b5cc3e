"""The configuration, the form of every error, limits of bodies, clients that go away, and how a server ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from mia_serve.core import MiaError
from mia_serve.http import ServerConfig
from tests.http.conftest import Running

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_the_recipe_is_a_configuration():
    config = ServerConfig.load(ROOT / "recipes" / "serve_cpu.yaml")
    assert config.host == "127.0.0.1" and config.llm is None and config.keys is None
    assert Path(config.data).resolve() == ROOT / "data" / "collections"
    assert config.e1.served_name == "all-MiniLM-L6-v2"


def test_paths_are_resolved_from_the_files_folder_and_names_stay(tmp_path: Path):
    (tmp_path / "my" / "model").mkdir(parents=True)
    path = write(tmp_path, "e1: {model: my/model}\ne2: {model: org/name}\ndata: d\nkeys: k.json\n")
    config = ServerConfig.load(path)
    assert config.e1.model == str(tmp_path / "my" / "model") and config.e1.served_name == "model"
    assert config.e2 is not None and config.e2.model == "org/name"
    assert (config.data, config.keys) == (tmp_path / "d", tmp_path / "k.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it must hold keys"),
        ("e1: [", "not valid YAML"),
        ("port: 1", "e1 is missing"),
        ("e1: {model: x}\nprot: 1", r"unknown key 'prot'; did you mean 'port'\? allowed: e1, e2, host, port"),
        ("e1: {model: x}\nlimits: {body: 1}", "unknown key 'limits.body'; .*allowed: body_mb, inputs"),
        ("e1: {model: x, devise: cpu}", "unknown key 'e1.devise'; did you mean 'device'"),
        ("e1: {model: x}\nllm: {modle: y}", "unknown key 'llm.modle'"),
        ("e1: {model: x}\nport: '1'", "port is '1'"),
        ("e1: {model: x}\nport: 70000", "port is 70000"),
        ("e1: {model: x}\nport: 1\nport: 2", r"serve\.yaml: line 3: 'port' is given twice"),
        ("e1: {model: x}\ndrain_s: .inf", "drain_s is inf"),
        ("e1: {model: x}\ncollections: {prior: .inf}", "collections.prior is inf"),
        ("e1: {model: x}\ncollections: {k_sum: 0}", "k_sum is 0: give a whole number from 1, or auto"),
        ("e1: {model: x}\ncollections: {k_sum: lots}", "k_sum is 'lots': give a whole number from 1, or auto"),
        ("e1: {model: x}\nllm: {url: 'localhost:8000'}", "llm.url is 'localhost:8000': give an address"),
        ("e1: {model: x}\nllm: {url: 'http://x', api_key_env: NO_SUCH}", "'NO_SUCH', which is not set"),
        ("e1: {model: x}\nhost: 0.0.0.0", "open to other machines"),
        ("e1: {model: x, backend: vllm}", "needs url"),
        ("e1: {model: x, url: 'http://x'}", "backend torch has none"),
        ("e1: {model: x}\nllm: {model: y}", "give either url"),
        ("e1: {model: x}\ncollections: {summarizer: llm}", "there is no llm"),
        ("e1: {model: x}\ncollections: {chunk_tokens: 64, chunk_overlap: 64}", "must be smaller"),
    ],
)
def test_a_wrong_configuration_says_what_is_allowed(text: str, told: str, tmp_path: Path):
    with pytest.raises(MiaError, match=told):
        ServerConfig.load(write(tmp_path, text))


def test_the_command_refuses_in_one_line(run, tmp_path: Path):
    assert "no such file" in run("serve", tmp_path / "none.yaml").refusal
    assert "unknown key 'x'" in run("serve", write(tmp_path, "e1: {model: y}\nx: 1")).refusal
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = write(tmp_path, "e1: {model: y}")
        assert "cannot be listened on" in run("serve", path, "--port", taken.getsockname()[1]).refusal


def problem(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": "e1"}',
        b'{"input": "x", "model": "\xff"}',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"model": "e1", "input": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "e1", "input": "\\ud800"}',
        b'{"model": "e1", "input": NaN}',
        b'{"model": "e1", "input": ["\\u0000"]}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/collections"])
def test_bodies_that_are_no_request_get_400(server: Running, path: str, body: bytes):
    answer = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
    assert problem(answer, 400)["type"] == "invalid_request_error"


def test_errors_of_routing_have_the_same_form(server: Running):
    assert problem(httpx.get(f"{server.url}/v1/nothing"), 404)["code"] == "not_found"
    wrong = httpx.put(f"{server.url}/v1/embeddings")
    assert problem(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"


async def test_a_bug_tells_the_client_nothing_and_the_log_no_text(client, caplog):
    async with client() as http:

        def fails() -> None:
            raise ZeroDivisionError("terces"[::-1])

        http.app.add_api_route("/fails", fails)
        answer = await http.get("/fails", headers={"X-Request-ID": "mine-1"})
        error = problem(answer, 500)
        assert error["type"] == "server_error" and "secret" not in answer.text and "Zero" not in answer.text
        logged = caplog.text
        assert "ZeroDivisionError" in logged and "mine-1" in logged and "secret" not in logged
        text = (await http.get("/metrics")).text
        assert 'mia_failures_total{reason="internal"} 1.0' in text


def test_answers_carry_an_id_and_safe_headers(server: Running):
    mine = httpx.get(f"{server.url}/health", headers={"X-Request-ID": "job-7"})
    assert mine.headers["x-request-id"] == "job-7"
    made = httpx.get(f"{server.url}/health", headers={"X-Request-ID": "x" * 65})
    assert re.fullmatch(r"[0-9a-f]{16}", made.headers["x-request-id"])
    for answer in (made, httpx.get(f"{server.url}/nothing")):
        assert answer.headers["x-content-type-options"] == "nosniff" and "server" not in answer.headers
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def send(server: Running, *pieces: bytes) -> bytes:
    """Send raw bytes and return what comes back until the server hangs up."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        found = b""
        try:
            for piece in pieces:
                raw.sendall(piece)
            while piece := raw.recv(65536):
                found += piece
        except OSError:
            pass  # it hung up while we were still sending
        return found


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 64,
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so(server: Running, text: bytes):
    answer = send(server, text)
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_endless_headers_are_cut_off(server: Running):
    one = send(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", *[b"a" * 2**16] * 64)
    many = send(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n", *[b"X-A: bbbbbbbb\r\n" * 5000] * 64)
    assert {answer[:12] for answer in (one, many)} <= {b"HTTP/1.1 431", b""}
    assert httpx.get(f"{server.url}/health", headers={"X": "a" * 8000}).status_code == 200


def test_a_body_that_says_it_is_too_large_is_refused_unread(server: Running):
    limit = int(server.config.limits.body_mb * 2**20)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {limit + 1}\r\n\r\n"
    assert send(server, head.encode()).startswith(b"HTTP/1.1 413")


def test_a_body_without_a_length_is_refused_while_it_streams(server: Running):
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 64 * 2**20:
            sent += 2**16
            yield b" " * 2**16

    try:
        answer = httpx.post(f"{server.url}/v1/embeddings", content=endless())
        assert problem(answer, 413)["code"] == "body_too_large"
    except (httpx.WriteError, httpx.ReadError):
        pass  # the server has hung up while we were still sending
    assert sent < 32 * 2**20, "it was not read to its end"
    assert httpx.get(f"{server.url}/health").status_code == 200


async def test_the_work_of_a_client_that_went_away_is_dropped_and_a_write_is_not(client):
    ended = []

    async with client() as http:
        from fastapi import Depends

        from mia_serve.http.keys import require

        async def work() -> str:
            try:
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                ended.append("dropped")
                raise
            ended.append("finished")
            return "done"

        http.app.add_api_route("/read", work, methods=["POST"], dependencies=[Depends(require("read"))])
        http.app.add_api_route("/write", work, methods=["POST"], dependencies=[Depends(require("write"))])
        for path in ("/read", "/write"):
            messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

            async def receive(messages=messages):
                return messages.pop(0) if messages else await asyncio.sleep(60)

            async def send(message):
                pass

            scope = {
                "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("mia", 80),
                "scheme": "http", "http_version": "1.1", "root_path": "",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
            }  # fmt: skip
            await http.app(scope, receive, send)
        assert ended == ["dropped", "finished"]
        text = (await http.get("/metrics")).text
        assert 'status="499"' in text


def test_without_keys_another_name_for_this_machine_is_refused(server: Running):
    for host, status in (
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8100", 200),
        ("evil.example", 403),
        ("", 403),
    ):
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == status, host


async def test_with_keys_or_open_any_name_will_do(client):
    async with client(open=True) as http:
        assert (await http.get("/v1/models", headers={"Host": "search.example"})).status_code == 200


def test_the_interface_can_be_read_without_a_script(server: Running):
    answer = httpx.get(f"{server.url}/docs")
    assert answer.status_code == 200 and "script" not in answer.text.lower().replace("description", "")
    assert "'sha256-" in answer.headers["content-security-policy"]
    for path in httpx.get(f"{server.url}/openapi.json").json()["paths"]:
        assert path in answer.text
    assert "Who took the ledger?" in answer.text, "the examples are there"


def test_the_openapi_is_complete(server: Running):
    schema = httpx.get(f"{server.url}/openapi.json").json()
    assert "HTTPValidationError" not in json.dumps(schema)
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation.get("summary") and operation.get("description"), where
            assert operation["tags"], where
            for status, answer in operation["responses"].items():
                if status >= "400":
                    assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
            if path.startswith("/v1/"):
                assert {"400", "401", "429", "503"} <= set(operation["responses"]), where
                assert operation["security"] == [{"HTTPBearer": []}], where


@pytest.fixture
def process(tmp_path: Path, tiny_bert: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, in a process of its own, and its address."""
    keys = {
        "e1": {"model": str(tiny_bert), "device": "cpu"}, "port": 0, "data": str(tmp_path / "c"), "drain_s": 8,
        "collections": {"window": 2},
    }  # fmt: skip
    path = write(tmp_path, yaml.safe_dump(keys))
    command = [sys.executable, "-m", "mia_serve", "serve", str(path)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        assert child.stderr is not None
        for line in child.stderr:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                break
        url = found.group()  # type: ignore[union-attr]
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield child, url
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_SRV_53_sigterm_finishes_what_is_under_way_and_exits_0(process):
    child, url = process
    asked = {"model": "e1", "input": ["the quay and the ferryman " * 12] * 512}

    def ask(_: int) -> int:
        return httpx.post(f"{url}/v1/embeddings", json=asked, timeout=60).status_code

    with ThreadPoolExecutor(10) as pool:
        waiting = [pool.submit(ask, i) for i in range(10)]
        time.sleep(0.4)
        child.send_signal(signal.SIGTERM)
        codes = [future.result() for future in waiting]
    assert set(codes) <= {200, 503} and codes.count(200) >= 1, codes
    assert child.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


def test_a_body_that_is_not_sent_as_json_is_refused_with_what_to_do(server: Running):
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server.url}/v1/collections", content=b'{"id": "x"}', headers=headers)
    assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]
