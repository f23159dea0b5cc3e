"""A benchmark small enough to work out by hand, an encoder that counts words, and a model that follows rules."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mia_serve.eval.qa import QaSettings, extractive_summariser
from mia_serve.eval.qa_data import QaBenchmark, QaBook, QaQuestion
from mia_serve.eval.qa_run import QaEncoders, QaPlan, run_qa
from mia_serve.eval.qa_systems import LABELS
from mia_serve.llm import ChatClient, ReplyCache

DIM = 64
SETTINGS = QaSettings(k=3, k0=6, k_sum=2, window=4, chunk_tokens=50, n_stop=2)
#: The heroes by book, and what each of their chapters is about.
HEROES = {"tide": "Anna", "lamp": "Boris", "quay": "Clara"}
THINGS = (
    "lantern",
    "ledger",
    "anchor",
    "compass",
    "kettle",
    "mirror",
    "violin",
    "saddle",
    "candle",
    "hammer",
    "ribbon",
)


@dataclass(frozen=True)
class _Template:
    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


@dataclass(frozen=True)
class WordSpec:
    base: str
    alpha: float = 0.5
    pooling: str = "mean"
    max_query_tokens: int = 64
    max_document_tokens: int = 64
    template: _Template = field(default_factory=_Template)


class WordEncoder:
    """Sum one fixed random vector a word; the signature is mixed in by alpha, as in an E2 that heeds it."""

    device = torch.device("cpu")
    dim = DIM
    tokenizer = None

    def __init__(self, name: str) -> None:
        self.spec = WordSpec(name)
        self.spec_hash = f"hash-of-{name}"

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        rows = np.zeros((len(texts), DIM), dtype=np.float32)
        for i, text in enumerate(texts):
            for word in re.findall(r"\w+", f"{self.spec.base[:0]}{text.lower()}"):
                rows[i] += np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIM)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def encode_documents(self, texts: Sequence[str], out: np.ndarray | None = None) -> np.ndarray:
        return self._vectors(texts)

    def encode_queries(
        self, texts: Sequence[str], signatures: Sequence[Any] | None = None, alpha: float | None = None
    ) -> np.ndarray:
        rows = self._vectors(texts)
        share = self.spec.alpha if alpha is None else alpha
        for i, signature in enumerate(signatures or []):
            if signature:
                rows[i] = (1 - share) * rows[i] + share * self._vectors([" ".join(signature)])[0]
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


BASE, E1, E2 = WordEncoder("base"), WordEncoder("e1"), WordEncoder("e2")


def book(name: str) -> QaBook:
    hero = HEROES[name]
    texts = [f"{hero} carried the {thing} to the {name} house in chapter {i}." for i, thing in enumerate(THINGS)]
    return QaBook(name, f"The {name}", "A. Author", sections=tuple((f"{name}:{i}", t) for i, t in enumerate(texts)))


def claim(name: str, thing: str, right: bool, gold: bool = True) -> QaQuestion:
    hero = HEROES[name] if right else "Nobody"
    return QaQuestion(
        f"{name}/{thing}/{right}", f"{hero} carried the {thing} to the {name} house.", "claim", name,
        label="TRUE" if right else "FALSE", pair=f"{name}/{thing}",
        gold_chunks=(f"{name}:{THINGS.index(thing)}",) if gold else (),
    )  # fmt: skip


def free(name: str, thing: str) -> QaQuestion:
    return QaQuestion(
        f"{name}/who/{thing}", f"Who carried the {thing} to the {name} house?", "free", name, answers=(HEROES[name],),
        gold_chunks=(f"{name}:{THINGS.index(thing)}",),
    )  # fmt: skip


def choice(name: str, thing: str) -> QaQuestion:
    options = ("Anna", "Boris", "Clara")
    return QaQuestion(
        f"{name}/choose/{thing}", f"Who carried the {thing} to the {name} house?", "choice", name, options=options,
        label="ABC"[options.index(HEROES[name])], gold_chunks=(f"{name}:{THINGS.index(thing)}",),
    )  # fmt: skip


def benchmark(questions: Sequence[QaQuestion], name: str = "nocha", **changes: Any) -> QaBenchmark:
    asked = dict.fromkeys(question.book for question in questions)
    made = QaBenchmark(
        name, "all", "en", {key: book(key) for key in asked}, tuple(questions), {key: (key,) for key in asked},
        chunk_tokens=50, overlap=0, mode="chunks+sig+evi",
    )  # fmt: skip
    return replace(made, **changes)


def claims(per_book: int = 2) -> QaBenchmark:
    """Pairs on all three books."""
    return benchmark([claim(b, t, right) for b in HEROES for t in THINGS[:per_book] for right in (True, False)])


def follow(body: dict[str, Any]) -> str:
    """Reply as a model would that reads: the same prompt always gets the same reply."""
    prompt = body["messages"][-1]["content"]
    if "response_format" in body:
        if '"pages"' in prompt:
            return '{"pages": [1]}'
        evidence = [{"fact": "It was carried.", "source": ["P1"]}]
        return json.dumps({"decision": "ANSWER", "next_query": "", "signature": ["S1"], "evidence": evidence})
    if "<statement>" in prompt:
        statement = re.search(r"<statement>(.*?)</statement>", prompt, re.DOTALL)
        assert statement
        found = statement[1].strip(". ") in prompt.split("<statement>")[0]
        return f"<explanation>read</explanation><answer>{'TRUE' if found else 'FALSE'}</answer>"
    hero = next((hero for hero in ("Anna", "Boris", "Clara") if f"{hero} carried" in prompt), "nobody")
    return (
        json.dumps({"answer": "ABCx"[("Anna", "Boris", "Clara", "nobody").index(hero)]})
        if "Options" in prompt
        else hero
    )


def plan(
    folder: Path, url: str | None, of: QaBenchmark, systems: Sequence[str] | None = None, **changes: Any
) -> QaPlan:
    """A run of all systems with all encoders; without an address only passages are retrieved."""
    client = None
    if url is not None:
        folder.mkdir(parents=True, exist_ok=True)
        client = ChatClient(url, "stub", cache=ReplyCache(folder / "replies.jsonl"), concurrency=8, max_retries=0)
    settings = replace(SETTINGS, **changes.pop("settings", {}))
    made = QaPlan(
        benchmark=of, settings=settings, systems=tuple(systems or LABELS), encoders=QaEncoders(BASE, E1, E2),  # type: ignore[arg-type]
        client=client, summarise=extractive_summariser(E1, "words"), folder=folder, asked={"limit": None}, n_boot=200,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(made, **changes)


def run(made: QaPlan) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        if made.client is None:
            return await run_qa(made)
        async with made.client:
            return await run_qa(made)

    return asyncio.run(work())


def run_claims(folder: str, url: str) -> None:
    """Run in a process of its own, which a test may kill."""
    run(plan(Path(folder), url, claims(), ("e1", "sig", "mia_rag", "agent_no_sig", "agent")))
