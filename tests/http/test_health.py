"""Probes and counters: what an operator sees."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mia_serve.http import create_app
from mia_serve.http.queue import EncodeQueue
from tests.http.conftest import connected


def counts(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Label values -> value of one sample name."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_health_and_ready_answer(client):
    async with client() as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).json() == {"status": "ready"}


async def test_SRV_19_one_request_counts_once(client):
    async with client() as http:
        asked = {"model": "e1", "input": "a b c"}
        before = counts((await http.get("/metrics")).text, "mia_encode_tokens_total")
        assert (await http.post("/v1/embeddings", json=asked)).status_code == 200
        text = (await http.get("/metrics")).text
        requests = counts(text, "mia_requests_total")
        assert requests[("POST", "/v1/embeddings", "200")] == 1
        assert counts(text, "mia_request_seconds_count")[("/v1/embeddings",)] == 1
        assert counts(text, "mia_encode_tokens_total")[("e1",)] - before[("e1",)] == 5


async def test_failures_are_counted_by_reason_and_paths_by_template(client):
    async with client() as http:
        await http.post("/v1/embeddings", json={"model": "nope", "input": "x"})
        await http.get("/no/such/place")
        await http.get("/v1/collections/nobody")
        text = (await http.get("/metrics")).text
        assert "nobody" not in text and "/no/such" not in text
        failures = counts(text, "mia_failures_total")
        assert failures[("model_not_found",)] == 1 and failures[("no_collection",)] == 1
        assert counts(text, "mia_requests_total")[("GET", "unmatched", "404")] == 1


async def test_metrics_speak_prometheus(client):
    async with client() as http:
        answer = await http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        names = {family.name for family in text_string_to_metric_families(answer.text)}
        assert {"mia_requests", "mia_queue_tokens", "mia_queue_items", "mia_batch_fill", "mia_encode_tokens"} <= names
        assert re.search(r'mia_encoder_alive\{encoder="e1"\} 1.0', answer.text)


async def test_health_is_red_while_an_encoder_hangs_and_green_after(client):
    async with client() as http:
        services = http.app.state.services
        services.probe_timeout_s, stop = 0.3, threading.Event()
        inner = services.queues[0]._encoder
        real = inner.embed_sequences
        inner.embed_sequences = lambda sequences: (stop.wait(20), real(sequences))[1]
        try:
            await asyncio.sleep(1.05)  # the last probe's answer stands for a second
            answer = await http.get("/health")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "unhealthy"
        finally:
            stop.set()
            inner.embed_sequences = real
        await asyncio.sleep(1.05)
        assert (await http.get("/health")).status_code == 200


async def test_health_is_red_while_a_worker_is_down(client, monkeypatch):
    async with client() as http:
        monkeypatch.setattr(EncodeQueue, "alive", property(lambda queue: False))
        await asyncio.sleep(1.05)
        answer = await http.get("/health")
        assert answer.status_code == 503 and "being started again" in answer.json()["error"]["message"]


async def test_health_is_no_hammer(client):
    async with client() as http:
        before = counts((await http.get("/metrics")).text, "mia_encode_batches_total")[("e1",)]
        answers = await asyncio.gather(*(http.get("/health") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        after = counts((await http.get("/metrics")).text, "mia_encode_batches_total")[("e1",)]
        assert after - before <= 2


async def test_a_server_whose_collections_cannot_be_opened_is_not_ready(make_config):
    config = make_config()
    async with connected(config), connected(config, wait=False) as second:  # two servers, one folder
        end = time.monotonic() + 10
        while second.app.state.services.failure is None:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        answer = await second.get("/ready")
        assert answer.status_code == 503 and "could not be opened" in answer.json()["error"]["message"]


async def test_nothing_is_served_before_the_collections_are_read(make_config, monkeypatch):
    from mia_serve.http.collections import Collections

    gate, opened = asyncio.Event(), Collections.open

    async def slow(self):
        await gate.wait()
        await opened(self)

    monkeypatch.setattr(Collections, "open", slow)
    app = create_app(make_config())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (answer := await http.get("/health")).status_code == 200, answer.text
            for path in ("/ready", "/v1/models"):
                answer = await http.get(path)
                assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
                assert "starting" in answer.json()["error"]["message"]
            gate.set()
            end = time.monotonic() + 10
            while (await http.get("/ready")).status_code != 200:
                assert time.monotonic() < end
                await asyncio.sleep(0.02)
            assert (await http.get("/v1/models")).status_code == 200
            app.state.services.draining = True
            assert (await http.get("/ready")).status_code == 503
