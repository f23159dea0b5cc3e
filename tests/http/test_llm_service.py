"""The language model of a server: found when it comes up, and missed by nothing but what needs it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from mia_serve.http import ServerConfig
from mia_serve.http.config import LlmConfig
from mia_serve.http.llm_service import LlmService
from mia_serve.mindscape import Window
from tests.http.test_health import counts
from tests.llm.server import serving

WINDOWS = [Window(("The ferryman counted the lamps.",), "Quay", "b"), Window(("One was missing.",), "Quay", "b", 2)]
SUMMARY = "The ferryman counts the lamps along the quay in the evening and finds that one of them is missing."


async def until(found: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not found():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_the_only_model_of_an_endpoint_is_taken_and_its_calls_are_counted(client):
    with serving(lambda prompt: "yes", models=["tiny-llm"]) as stub:
        async with client(llm={"url": stub.url}) as http:
            services = http.app.state.services
            await until(lambda: services.llm)
            assert services.llm.model == "tiny-llm" and services.llm_error is None
            for _ in range(3):
                await services.llm.chat([{"role": "user", "content": "well?"}])
            text = (await http.get("/metrics")).text
            assert counts(text, "mia_llm_calls_total")[()] == 3
            assert counts(text, "mia_llm_tokens_total")[("prompt",)] == services.llm.stats.prompt_tokens > 0


async def test_a_server_without_its_model_searches_all_the_same(client):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with client(llm={"url": f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"}) as http:
            services = http.app.state.services
            await until(lambda: services.llm_error != "the language model is starting")
            assert services.llm is None and "cannot be asked" in services.llm_error
            assert (await http.get("/ready")).status_code == 200
            assert (await http.post("/v1/embeddings", json={"model": "e1", "input": "x"})).status_code == 200


async def test_several_models_are_named_in_the_log_and_none_is_taken(client, caplog):
    with serving(lambda prompt: "yes", models=["a", "b"]) as stub:
        async with client(llm={"url": stub.url}) as http:
            await until(lambda: "2 models (a, b)" in caplog.text)
            assert http.app.state.services.llm is None


async def test_summaries_are_the_models_and_the_stand_ins_while_it_is_down():
    service = LlmService(LlmConfig(url="http://127.0.0.1:1/v1", model="m"))
    summaries = service.summaries(lambda windows: ["stand-in"] * len(windows))
    assert await asyncio.to_thread(summaries.books, WINDOWS) == ["stand-in"] * 2, "not yet up"
    with serving(lambda prompt: SUMMARY, models=["m"], context=4096) as stub:
        service = LlmService(LlmConfig(url=stub.url, model="m"))
        service.start()
        await until(lambda: service.client)
        summaries = service.summaries(lambda windows: ["stand-in"] * len(windows))
        assert await asyncio.to_thread(summaries.books, WINDOWS) == [SUMMARY] * 2
        assert await asyncio.to_thread(summaries.chats, WINDOWS) == [SUMMARY] * 2
        assert service.stats is not None and service.stats.calls == 4
    assert await asyncio.to_thread(summaries.books, WINDOWS) == ["stand-in"] * 2, "down again"
    await service.close()


def test_no_model_is_no_error(make_config):
    config: ServerConfig = make_config()
    assert config.llm is None and LlmService(None).error is None and LlmService(None).stats is None
