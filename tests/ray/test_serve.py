"""A service on a cluster of two nodes: answers of one machine, and none lost when a replica or a node dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from mia_serve.core.errors import MiaError
from mia_serve.http.config import EncoderConfig, ServerConfig
from tests.ray.conftest import QUERIES, Library

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

K = 12


class Service(NamedTuple):
    """A service that runs, and what it is to answer."""

    url: str
    library: Library
    expected: dict[str, Any]

    def search(self, query: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/collections/books/search", json={"query": query, "k": K} | more, timeout=60)


def replicas(name: str) -> list[int]:
    """Process ids of the replicas of a deployment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if title.startswith(f"ray::ServeReplica:mia:{name}"):
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def service(
    library: Library, tiny_bert: Path, tiny_qwen3: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Two shards, E1, E2 and a front, on two nodes."""
    from ray import serve

    from mia_serve.http.ray_cluster import connected
    from mia_serve.http.ray_serve import plan_service, start

    data = tmp_path_factory.mktemp("data")
    shutil.copytree(library.folder, data / "books")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    e1, e2 = (EncoderConfig(model=str(folder), device="cpu") for folder in (tiny_bert, tiny_qwen3))
    config = ServerConfig(e1=e1, e2=e2, data=data, port=port)
    expected = {}
    one = library.retriever()
    found = one.search(QUERIES, K)
    for query, ids, scores, signature in zip(QUERIES, *found.hits[:2], found.signatures or [], strict=True):
        expected[query] = (ids, scores.tolist(), list(signature.session_ids), list(signature.gains))
    with connected(cluster.address):
        start(plan_service(config, shards=2, encoders=1, copies=1, fronts=1, cpus=0.1))
        yield Service(f"http://127.0.0.1:{port}", library, expected)
        serve.shutdown()
    deadline = time.monotonic() + 20
    while replicas("") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not replicas(""), "the service leaves processes behind"


def check(answer: httpx.Response, expected: tuple[Any, ...]) -> None:
    body = answer.json()
    ids, scores, sessions, gains = expected
    assert [hit["id"] for hit in body["hits"]] == ids
    np.testing.assert_allclose([hit["score"] for hit in body["hits"]], scores, atol=1e-6)
    assert body["signature"]["session_ids"] == sessions
    np.testing.assert_allclose(body["signature"]["gains"], gains, atol=1e-6)


def test_answers_are_those_of_one_machine(service: Service) -> None:
    for query, expected in service.expected.items():
        check(service.search(query), expected)
    plain = service.library.retriever().search([QUERIES[0]], 3, "none", "e1").hits
    hits = service.search(QUERIES[0], k=3, encoder="e1").json()["hits"]
    assert [hit["id"] for hit in hits] == plain.ids[0]
    text = {chunk.id: chunk.text for chunk in service.library.mindscape.chunks}
    assert all(hit["text"] == text[hit["id"]] for hit in hits)
    chosen = httpx.post(f"{service.url}/v1/signature", json={"collection": "books", "query": QUERIES[1]}).json()
    assert chosen["session_ids"] == service.expected[QUERIES[1]][2] and len(chosen["pool"]) >= 5
    listed = httpx.get(f"{service.url}/v1/collections").json()["collections"]
    assert listed == [{"id": "books", "version": 0, "chunks": 93, "shards": 2}]
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_encoders_answer_embeddings_and_refuse_as_the_server_does(service: Service) -> None:
    texts = ["the boat", "the lamp " * 9, "潮水"]
    made = httpx.post(f"{service.url}/v1/embeddings", json={"input": texts, "model": "e1"}).json()
    vectors = np.asarray([item["embedding"] for item in made["data"]])
    np.testing.assert_allclose(vectors, service.library.e1.encode_documents(texts), atol=1e-6)
    long = httpx.post(f"{service.url}/v1/embeddings", json={"input": "lamp " * 900, "model": "e1"})
    assert long.status_code == 413 and long.json()["error"]["code"] == "too_long"
    for body, status in (({"mode": "fused"}, 400), ({"target": "sessions"}, 400), ({"k": 0}, 422)):
        assert service.search("who?", **body).status_code in (status, 400)
    gone = httpx.post(f"{service.url}/v1/collections/none/search", json={"query": "who?"})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "no_collection"


class Load:
    """Clients that search again and again, and ask again where they are told to."""

    def __init__(self, service: Service, clients: int = 3) -> None:
        self.service, self.over = service, threading.Event()
        self.answered, self.again = 0, 0
        self.wrong: list[str] = []
        self.threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]

    def _client(self, number: int) -> None:
        while not self.over.is_set():
            query = QUERIES[number % len(QUERIES)]
            number += 1
            until = time.monotonic() + 90
            while True:
                try:
                    answer = self.service.search(query)
                    if answer.status_code == 200:
                        break
                    problem = f"{answer.status_code} {answer.text[:200]}"
                except httpx.TransportError as error:
                    problem = repr(error)
                self.again += 1
                if time.monotonic() > until:
                    self.wrong.append(problem)
                    return
                time.sleep(0.2)
            try:
                check(answer, self.service.expected[query])
            except AssertionError as error:
                self.wrong.append(str(error))
            self.answered += 1
            time.sleep(0.1)  # the replicas that start anew need the processor too

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests are answered."""
        goal, until = self.answered + more, time.monotonic() + 120
        while self.answered < goal and not self.wrong and time.monotonic() < until:
            time.sleep(0.05)


def test_killed_replicas_lose_no_request(service: Service) -> None:
    with Load(service) as load:
        load.wait_for(5)
        killed = [replicas(name)[0] for name in ("shard-1", "e1")]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        load.wait_for(20)
    assert not load.wrong and not load.again, (load.wrong, load.again)
    assert load.answered > 20


def test_a_killed_node_loses_no_request(service: Service, cluster: Any) -> None:
    node, everyone = next(iter(cluster.worker_nodes)), replicas("")
    with Load(service) as load:
        load.wait_for(5)
        cluster.remove_node(node, allow_graceful=False)
        load.wait_for(30)
        deadline = time.monotonic() + 60
        while len(replicas("")) != len(everyone) and time.monotonic() < deadline:
            time.sleep(0.2)
        load.wait_for(10)
    assert not load.wrong, load.wrong
    assert load.answered > 40 and len(replicas("")) == len(everyone)


def test_what_is_not_offered_is_refused_before_anything_starts(library: Library, tmp_path: Path) -> None:
    from mia_serve.http.ray_serve import plan_service

    e1 = EncoderConfig(model="x")
    with pytest.raises(MiaError, match="port 0"):
        plan_service(ServerConfig(e1=e1, port=0), 2, 1, 1, 1, 1.0)
    with pytest.raises(MiaError, match="holds no collection"):
        plan_service(ServerConfig(e1=e1, data=tmp_path), 2, 1, 1, 1, 1.0)
    far = EncoderConfig(model="x", backend="vllm", url="http://127.0.0.1:1")
    with pytest.raises(MiaError, match=r"e1\.backend is 'vllm'"):
        plan_service(ServerConfig(e1=far, data=library.folder.parent), 2, 1, 1, 1, 1.0)
