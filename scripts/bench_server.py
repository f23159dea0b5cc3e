#!/usr/bin/env python3
"""Load `mia-serve serve` with 64 clients beside infinity, in one run on this machine; all answers are checked.

    scripts/bench_server.py --json scripts/receipts/bench_server.json

infinity lives in an environment of its own:

    python -m venv .venv-infinity && .venv-infinity/bin/pip install 'infinity-emb[torch,server]==0.0.78' \
        'transformers==4.57.*' 'sentence-transformers==3.4.*' 'numpy==1.26.*'

Both serve all-MiniLM-L6-v2 in float32 on the CPU with as many threads as there are cores, and share these with the
clients, which run in one more process (bench_load.py). A client sends one text and waits for its vector. Rounds are
interleaved and change their order: offline encoding of the mixed texts, then for each server the mixed load and the
load of texts of one length, which is the mean of the mixed ones. Every vector is compared with the offline one. What
other processes took of the cores is measured too: threads that wait for each other make a little of it cost a lot, so
numbers from a machine that was not idle do not count.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from mia_serve.core import Encoder
from mia_serve.core.names import resolve_folder
from mia_serve.eval.versions import package_versions

MODEL = "all-MiniLM-L6-v2"
CLIENTS, TEXTS = 64, 1024
SHORTEST, LONGEST = 4, 256  # tokens, special ones included; drawn log-uniformly
CLOSE = 1e-4  # how far a value of a unit vector may lie from the offline one
PEER = Path(__file__).parents[1] / ".venv-infinity/bin/infinity_emb"
SHARE_OFFLINE, SHARE_P50 = 0.9, 4.0  # what must hold
OTHERS = 0.1  # cores that may be busy with something else


class Load(NamedTuple):
    """Texts to send, how long they are, and what must come back."""

    texts: list[str]
    tokens: np.ndarray  # (n,) int
    vectors: np.ndarray  # (n, d) float32


class Server(NamedTuple):
    """A server that is up."""

    name: str
    port: int
    model: str
    path: str
    pid: int


def make_texts(encoder: Encoder, lengths: list[int], seed: int) -> list[str]:
    """Return texts of random words, each of them one token, so that lengths are exact."""
    vocabulary = sorted(w for w in encoder.tokenizer.get_vocab() if w.isascii() and w.isalpha() and len(w) > 2)
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(vocabulary, length - 2)) for length in lengths]
    found = [len(sequence.ids) for sequence in encoder.text.documents(texts)]
    if found != lengths:
        raise RuntimeError("the texts are not as long as they should be")
    return texts


def make_loads(encoder: Encoder) -> dict[str, Load]:
    """Return the mixed load and the one of equal lengths."""
    random = np.random.default_rng(0)
    mixed = np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST), TEXTS)).round().astype(int)
    loads = {}
    for seed, (name, lengths) in enumerate({"mixed": mixed, "equal": np.full(TEXTS, round(mixed.mean()))}.items()):
        texts = make_texts(encoder, lengths.tolist(), seed)
        loads[name] = Load(texts, lengths, encoder.encode_documents(texts))
    return loads


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, probe: str, threads: int, folder: Path) -> Iterator[int]:
    """Start a server, wait until it is ready, and yield its process id; stop it at the end."""
    settings = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    settings |= {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 180
            while not _answers(port, probe):
                if child.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.3)
            yield child.pid
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _answers(port: int, probe: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe}", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_servers(stack: ExitStack, peer: Path, threads: int, folder: Path) -> list[Server]:
    """Start ours and infinity."""
    servers = []
    port = free_port()
    config = folder / "serve.yaml"
    keys = {"e1": {"model": MODEL, "device": "cpu"}, "port": port, "data": str(folder / "collections")}
    config.write_text(json.dumps(keys))  # JSON is YAML
    command = [sys.executable, "-m", "mia_serve", "serve", str(config)]
    pid = stack.enter_context(running(command, port, "/ready", threads, folder))
    servers.append(Server("mia", port, "e1", "/v1/embeddings", pid))
    port = free_port()
    command = [str(peer), "v2", "--model-id", str(resolve_folder(MODEL)), "--served-model-name", "minilm"]
    command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "warning"]
    pid = stack.enter_context(running(command, port, "/health", threads, folder))
    servers.append(Server("infinity", port, "minilm", "/embeddings", pid))
    return servers


class OtherCores:
    """How many cores something else than this benchmark keeps busy, from now on."""

    def __init__(self, servers: list[Server]) -> None:
        self.pids = [server.pid for server in servers]
        self.started, self.before = time.perf_counter(), self._others()

    def __call__(self) -> float:
        """Return them."""
        return max(0.0, (self._others() - self.before) / (time.perf_counter() - self.started))

    def _others(self) -> float:
        """Return the seconds of all cores that are not ours."""
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        for pid in self.pids:  # user and system time, with those of its children that have ended
            own += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / tick
        return (user + nice + system + irq + softirq) / tick - own


def measure(server: Server, load: Load, seconds: float, folder: Path) -> dict[str, Any]:
    """Put a load on a server, and compare all its answers with the offline vectors."""
    plan, answers = folder / "plan.json", folder / "answers.bin"
    plan.write_text(json.dumps({"texts": load.texts, "clients": CLIENTS, "model": server.model, "path": server.path}))
    command = [sys.executable, str(Path(__file__).with_name("bench_load.py")), str(plan), str(server.port)]
    command += [str(seconds), str(answers)]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    statuses: dict[str, int] = {}
    wrong, worst = 0, 0.0
    with answers.open("rb") as bodies:
        for text, status, _, _, size in report["rows"]:
            body = bodies.read(size)
            statuses[str(status)] = statuses.get(str(status), 0) + 1
            if status == 200:
                difference = _difference(body, load.vectors[text])
                wrong, worst = wrong + (not difference <= CLOSE), max(worst, difference)
    counted = [row for row in report["rows"] if row[2] >= 0]
    done = sum(int(load.tokens[text]) for text, _, _, ended, _ in report["rows"] if 0 <= ended <= seconds)
    return {
        "requests": len(report["rows"]),
        "statuses": statuses,
        "wrong": wrong,
        "largest_difference": worst,
        "tokens_per_second": done / seconds,
        "generator_cores": report["generator_cores"],
        "latencies": [ended - started for _, _, started, ended, _ in counted],
    }


def _difference(body: bytes, expected: np.ndarray) -> float:
    """Return how far an answer lies from the offline vector; infinite where it has no such vector."""
    try:
        (row,) = orjson.loads(body)["data"]
        vector = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    except (ValueError, KeyError, TypeError):
        return float("inf")
    if vector.shape != expected.shape or not np.isfinite(vector).all():
        return float("inf")
    return float(np.abs(vector - expected).max())


def offline(encoder: Encoder, load: Load) -> float:
    """Return the tokens a second of encoding the same texts in this process."""
    started = time.perf_counter()
    encoder.encode_documents(load.texts)
    return float(load.tokens.sum() / (time.perf_counter() - started))


def run_rounds(
    encoder: Encoder, servers: list[Server], loads: dict[str, Load], rounds: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """Take turns, and return what came out by who and load."""
    found: dict[str, Any] = {"offline": {"tokens_per_second": []}}
    found["other_cores"] = []
    found |= {server.name: {name: [] for name in loads} for server in servers}
    for number in range(rounds):
        others = OtherCores(servers)
        turns: list[Any] = [None, *((server, name) for name in loads for server in servers)]
        for turn in turns if number % 2 == 0 else reversed(turns):
            if turn is None:
                found["offline"]["tokens_per_second"].append(offline(encoder, loads["mixed"]))
                continue
            server, name = turn
            length = seconds / rounds if name == "mixed" else seconds / rounds / 2
            row = measure(server, loads[name], length, folder)
            found[server.name][name].append(row)
            shown = {k: v for k, v in row.items() if k != "latencies"}
            print(f"round {number + 1} {server.name} {name}: {json.dumps(shown)}", flush=True)
        found["other_cores"].append(others())
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the rounds of one server under one load."""
    latencies = np.concatenate([row.pop("latencies") for row in rows])
    statuses: dict[str, int] = {}
    for row in rows:
        for status, count in row["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    return {
        "requests": sum(row["requests"] for row in rows),
        "statuses": statuses,
        "wrong": sum(row["wrong"] for row in rows),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "latency_ms": {f"p{q}": float(np.percentile(latencies, q)) * 1000 for q in (50, 90, 99, 100)},
        "generator_cores": statistics.median(row["generator_cores"] for row in rows),
        "tokens_per_second_by_round": [row["tokens_per_second"] for row in rows],
    }


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Hold the numbers against what is promised."""
    ours, peer = found["mia"], found["infinity"]
    rates = {name: found[name]["mixed"]["tokens_per_second_by_round"] for name in ("mia", "infinity")}
    of_offline = zip(rates["mia"], found["offline"]["tokens_per_second"], strict=True)
    of_peer = zip(rates["mia"], rates["infinity"], strict=True)
    p99_share = ours["mixed"]["latency_ms"]["p99"] / ours["equal"]["latency_ms"]["p50"]
    ratio_offline = statistics.median(a / b for a, b in of_offline)
    ratio_peer = statistics.median(a / b for a, b in of_peer)
    only_ok = all(set(ours[load]["statuses"]) == {"200"} for load in ("mixed", "equal"))
    return {
        "all_answers_right": only_ok and all(part[load]["wrong"] == 0 for part in (ours, peer) for load in part),
        "p99_mixed_over_p50_equal": p99_share,
        "throughput_over_offline": ratio_offline,
        "throughput_over_infinity": ratio_peer,
        "holds": {
            "right and no error": only_ok and ours["mixed"]["wrong"] + ours["equal"]["wrong"] == 0,
            f"p99 of mixed within {SHARE_P50:g} x p50 of equal": p99_share <= SHARE_P50,
            f"throughput at least {SHARE_OFFLINE:g} x offline": ratio_offline >= SHARE_OFFLINE,
            "ahead of infinity": ratio_peer > 1.0,
            "the machine was idle otherwise": max(found["other_cores"]) <= OTHERS,
        },
    }


def environment(threads: int, peer: Path) -> dict[str, Any]:
    """Return what the numbers depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    names = ("infinity-emb", "torch", "transformers", "sentence-transformers", "fastapi", "uvicorn", "numpy")
    ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    python = peer.with_name("python")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load_average_before": os.getloadavg()[0],
        "versions": package_versions(["torch", "transformers", "numpy", "fastapi", "uvicorn", "httptools", "uvloop"]),
        "versions_of_infinity": json.loads(subprocess.run([python, "-c", ask], capture_output=True, check=True).stdout),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of mixed load for each server, all rounds together"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--infinity", type=Path, default=PEER, help="the command infinity_emb of its environment")
    options = parser.parse_args()
    if not options.infinity.is_file():
        parser.error(f"there is no infinity at {options.infinity}; see the head of this script for how to install it")
    import torch

    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"environment": environment(options.threads, options.infinity)}
    encoder = Encoder.load(MODEL, device="cpu")
    loads = make_loads(encoder)
    print("offline vectors made", flush=True)
    record["what"] = (
        f"{MODEL}, float32, CPU; {CLIENTS} clients in a closed loop, one text a request, {TEXTS} texts; mixed: "
        f"{SHORTEST} to {LONGEST} tokens, log-uniform; equal: all of {loads['equal'].tokens[0]} tokens; "
        f"{options.rounds} rounds, {options.seconds:g} s of mixed load for each server in all, half as much of equal"
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = start_servers(stack, options.infinity.absolute(), options.threads, folder)
        print("servers up", flush=True)
        for server in servers:  # outputs first; it warms up as well
            first = measure(server, loads["mixed"], 1.0, folder)
            if first["wrong"] or set(first["statuses"]) != {"200"}:
                raise SystemExit(f"{server.name}: {first['wrong']} wrong answers, statuses {first['statuses']}")
        found = run_rounds(encoder, servers, loads, options.rounds, options.seconds, folder)
    for server in servers:
        found[server.name] = {load: summary(rows) for load, rows in found[server.name].items()}
    record |= found
    record["verdict"] = verdict(found)
    print(json.dumps(record["verdict"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(record["verdict"]["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
