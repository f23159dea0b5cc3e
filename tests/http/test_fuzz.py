"""Requests made from the server's own OpenAPI, and malformed HTTP: no 500, a server that stays up, memory that is flat.

They are more than 2,000 in all; MIA_FUZZ sets how many are made from the OpenAPI, which is what takes its time.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.http.fuzzed import Child, bodies, malformed, post, running, send, statuses
from tests.llm.server import serving

REQUESTS = int(os.environ.get("MIA_FUZZ", "500"))
GROWTH = 24.0  # MiB on top after the first part: the collections that the requests make and fill
SLACK = 8.0  # MiB that the allocator may keep, where nothing is stored
BOOK = " ".join(f"The ferryman counted lamp {i} along the quay, and found it lit." for i in range(40))


@pytest.fixture(scope="module")
def child(tiny_bert: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A server with everything on: two encoders, a language model, and a collection ``known``."""
    encoders = {"e1": {"model": str(tiny_bert), "device": "cpu"}, "e2": {"model": str(tiny_qwen3), "device": "cpu"}}
    with (
        serving(lambda body: "The lamp is lit.") as llm,
        running(
            tmp_path_factory.mktemp("fuzz"),
            **encoders,
            llm={"url": llm.url, "model": "stub"},
            collections={"window": 2, "chunk_tokens": 32},
        ) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def known(child: Child) -> str:
    with httpx.Client(base_url=child.url, timeout=60) as client:
        assert client.post("/v1/collections", json={"id": "known"}).status_code == 201
        added = client.post("/v1/collections/known/chunks", json={"text": BOOK, "book_id": "b"})
        assert added.is_success, added.text
    return "known"


def healthy(child: Child) -> None:
    assert httpx.get(f"{child.url}/health", timeout=30).status_code == 200
    answer = httpx.post(f"{child.url}/v1/embeddings", json={"model": "e1", "input": "a"}, timeout=30)
    assert answer.status_code == 200 and len(answer.json()["data"][0]["embedding"]) == 32


def operations(child: Child) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{child.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def aim(case: Any, known: str, number: int) -> None:
    """Point three of four requests at a collection that is there, and which none of them may delete."""
    deletes = case.method.upper() == "DELETE" and case.path.endswith("{id}")
    if number % 4 == 0 or deletes:
        return
    if case.path_parameters and "id" in case.path_parameters:
        case.path_parameters["id"] = known
    if isinstance(case.body, dict) and "collection" in case.body:
        case.body["collection"] = known


def fuzz(operation: Any, cases: Any, count: int, number: int, known: str, seen: Counter[str]) -> list[str]:
    """Send requests to one operation, and return what is wrong with the answers."""
    wrong: list[str] = []
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    session = requests.Session()
    sent = 0

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases)
    def one(case: Any) -> None:
        nonlocal sent
        sent += 1
        aim(case, known, sent)
        answer = case.call(session=session, timeout=60)
        seen[f"{answer.status_code}"] += 1
        streamed = answer.headers["content-type"][0].startswith("text/event-stream")
        try:
            assert answer.status_code < 500, f"{answer.status_code} {answer.text[:300]}"
            # The schema of a stream is that of its whole text; schemathesis would hold it against each event.
            case.validate_response(answer, checks=checks[: 2 if streamed else 3])
        except (AssertionError, FailureGroup) as error:
            wrong.append(f"{operation.label}: {error} -- {case.as_curl_command()}"[:1500])

    one()
    return wrong


def test_requests_from_the_openapi_never_get_a_500_and_leave_no_memory_behind(child: Child, known: str):
    ours = operations(child)
    assert len(ours) > 12
    kinds = [
        (operation, operation.as_strategy(generation_mode=mode))
        for operation in ours
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or takes_anything(operation)
    ]
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    memory: list[float] = []
    part = 0
    while part < 2 or seen.total() < REQUESTS:  # the first part warms up; what takes few values stops early
        for operation, cases in kinds:
            wrong += fuzz(operation, cases, -(-REQUESTS // (2 * len(kinds))), part, known, seen)
        memory.append(child.memory)
        part += 1
    print(dict(seen), memory)
    assert not wrong, f"{len(wrong)} wrong answers\n" + "\n".join(wrong[:5])
    assert seen["200"] > REQUESTS / 5 and seen["400"] > REQUESTS / 20, seen
    assert memory[-1] < memory[0] + GROWTH, memory
    healthy(child)


def takes_anything(operation: Any) -> bool:
    """Whether an operation has parameters or a body that could be wrong."""
    return bool(operation.body or operation.query or operation.path_parameters)


def test_malformed_http_never_gets_a_500(child: Child):
    wrong: list[str] = []
    memory = []
    seen: Counter[int] = Counter()
    for number in range(3):
        cases = list(malformed())
        with ThreadPoolExecutor(16) as threads:
            answers = threads.map(partial(send, child.url, close=number == 1), [data for _, data in cases])
        for (name, _), answer in zip(cases, answers, strict=True):
            seen.update(statuses(answer))
            wrong += [f"{name}: {answer[:300]!r}" for status in statuses(answer) if status >= 500]
        memory.append(child.memory)
        healthy(child)
    print(seen, memory)
    assert not wrong, "\n".join(wrong)
    assert seen[400] > 100 and seen[200] > 50
    assert memory[-1] < memory[0] + SLACK, memory


def test_odd_bodies_are_refused_or_taken_and_never_get_a_500(child: Child, known: str):
    routes = [
        (operation.method.upper(), operation.path.replace("{id}", known))
        for operation in operations(child)
        if operation.body
    ]
    assert len(routes) >= 7
    wrong, memory = [], []
    seen: Counter[int] = Counter()
    for _ in range(2):
        for name, body in bodies():
            for method, path in routes:
                answer = send(child.url, post(path, body, method=method), close=False)
                found = statuses(answer)
                seen.update(found)
                refused = found and 400 <= found[0] < 500
                if (found and found[0] >= 500) or (refused and b'{"error":{"message":' not in answer):
                    wrong.append(f"{method} {path} {name}: {answer[:400]!r}")
        memory.append(child.memory)
        healthy(child)
    print(seen, memory)
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:10])
    assert memory[-1] < memory[0] + SLACK, memory


def test_clients_that_never_finish_keep_nobody_waiting(child: Child):
    host, port = child.url.removeprefix("http://").split(":")
    starts = [
        b"",
        b"G",
        b"GET /health HTTP/1.1\r\nX: ",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 90\r\n\r\n{",
    ]
    before = child.memory
    for _ in range(3):
        held = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
        for number, connection in enumerate(held):
            connection.sendall(starts[number % len(starts)])
        healthy(child)
        for connection in held:
            connection.close()
    healthy(child)
    assert child.memory < before + SLACK
