"""Keys: what they open, what they do not, and that they stay secret."""

from __future__ import annotations

import json
import logging
import stat
import time
from pathlib import Path

import pytest

from mia_serve.core import MiaError
from mia_serve.http.keys import KeyRing, add_key, read_keys, revoke_key

OPEN = {"/health", "/ready"}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_key_is_made_listed_and_revoked_by_commands(run, tmp_path: Path):
    file = tmp_path / "keys.json"
    made = run("key", "add", "--keys", file, "--name", "shop", "--role", "write", "--requests-per-minute", 7)
    secret = made.out.strip()
    assert made.code == 0 and len(secret) > 40
    listed = run("key", "list", "--keys", file)
    assert "write" in listed.out and "shop" in listed.out and "7 requests/min" in listed.out
    assert secret not in listed.out + listed.err
    (key,) = read_keys(file)
    assert run("key", "revoke", "--keys", file, key.id).code == 0
    assert read_keys(file) == []
    assert "has no key 'nobody'" in run("key", "revoke", "--keys", file, "nobody").refusal


def test_the_file_holds_no_key_and_is_private(tmp_path: Path):
    file = tmp_path / "keys.json"
    _, secret = add_key(file, "shop", "read")
    assert secret not in file.read_text() and secret.removeprefix("mia-") not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_ring_finds_its_keys_only(tmp_path: Path):
    file = tmp_path / "keys.json"
    made = [add_key(file, str(i), "read") for i in range(3)]
    ring = KeyRing(file)
    assert [ring.find(secret) for _, secret in made] == [key for key, _ in made]
    assert ring.find("") is None and ring.find(made[0][1][:-1]) is None and ring.find("schlüssel\udcff") is None
    assert ring.find(made[0][0].sha256) is None, "the digest is no key"


def test_a_running_ring_learns_of_new_and_revoked_keys(tmp_path: Path):
    file = tmp_path / "keys.json"
    first, secret = add_key(file, "a", "read")
    ring = KeyRing(file)
    _, other = add_key(file, "b", "read")
    revoke_key(file, first.id)
    end = time.monotonic() + 3
    while ring.find(secret) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert ring.find(secret) is None and ring.find(other) is not None
    file.write_text("{")
    time.sleep(1.1)
    assert ring.find(other) is not None, "a broken file throws nobody out"


@pytest.mark.parametrize("text", ["{", "[]", '{"keys": [{"id": "x"}]}', '{"keys": 3}'])
def test_a_broken_file_is_refused(text: str, tmp_path: Path):
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(MiaError, match="not a file of keys"):
        KeyRing(file)


async def test_SRV_18_every_route_wants_a_key_but_the_probes(client, tmp_path: Path):
    file = tmp_path / "keys.json"
    add_key(file, "a", "admin")
    async with client(keys=file) as http:
        schema = http.app.openapi()
        tried = 0
        for path, methods in schema["paths"].items():
            for method in methods:
                for headers in ({}, bearer("mia-wrong"), {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"}):
                    where = path.replace("{collection_id}", "x").replace("{id}", "x")
                    answer = await http.request(method.upper(), where, headers=headers, content=b"{}")
                    tried += 1
                    if path in OPEN:
                        assert answer.status_code == 200, path
                    else:
                        assert answer.status_code == 401, (method, path, answer.text)
                        assert answer.headers["www-authenticate"] == "Bearer"
                        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert tried >= 4 * 15


async def test_a_role_opens_what_it_names_and_no_more(client, tmp_path: Path):
    file = tmp_path / "keys.json"
    secrets = {role: add_key(file, role, role)[1] for role in ("read", "write", "admin")}
    asked = {"model": "e1", "input": "the quay"}
    async with client(keys=file) as http:
        for secret in secrets.values():
            assert (await http.post("/v1/embeddings", json=asked, headers=bearer(secret))).status_code == 200
        refused = await http.post("/v1/collections", json={"id": "x"}, headers=bearer(secrets["read"]))
        assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"


async def test_requests_of_a_minute_are_counted_by_key(client, tmp_path: Path):
    file = tmp_path / "keys.json"
    _, mine = add_key(file, "a", "read", requests_per_minute=2)
    _, other = add_key(file, "b", "read")
    async with client(keys=file) as http:
        codes = [(await http.get("/v1/models", headers=bearer(mine))).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = await http.get("/v1/models", headers=bearer(mine))
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/v1/models", headers=bearer(other))).status_code == 200


async def test_tokens_of_a_minute_are_counted_as_encoded(client):
    asked = {"model": "e1", "input": "the quay"}
    async with client(limits={"tokens_per_minute": 5}) as http:
        first = await http.post("/v1/embeddings", json=asked)
        used = first.json()["usage"]["total_tokens"]
        assert used >= 4
        codes = [(await http.post("/v1/embeddings", json=asked)).status_code for _ in range(3)]
        assert codes[-1] == 429 and codes.count(200) == (5 - 1) // used


async def test_SRV_18_no_key_and_no_text_in_the_log(client, tmp_path: Path, caplog):
    file = tmp_path / "keys.json"
    _, secret = add_key(file, "a", "read")
    with caplog.at_level(logging.DEBUG, logger="mia_serve"):
        async with client(keys=file) as http:
            await http.post("/v1/embeddings", json={"model": "e1", "input": "zanzibar"}, headers=bearer(secret))
            await http.get("/v1/collections/zanzibar", headers=bearer(secret))
            await http.get("/v1/models?zanzibar=1", headers=bearer("mia-zanzibar"))
            await http.post("/v1/embeddings", json={"model": "zanzibar", "input": []}, headers=bearer(secret))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mia_serve")]
    assert sum("/v1/embeddings 200" in line for line in lines) == 1, "the log was looked at"
    assert not [line for line in lines if "zanzibar" in line or secret in line]
    assert json.loads(file.read_text())["keys"][0]["id"] in "\n".join(lines)


def test_a_missing_file_of_keys_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="`mia-serve key add` makes one"):
        KeyRing(tmp_path / "none.json")
