"""What the page consists of, and how its files are served."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from mia_serve.http.page import FILES
from tests.http.conftest import Running

TEXTS = {name: file.content.decode() for name, file in FILES.items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


def test_the_page_is_served_with_a_policy_that_lets_in_nothing_else(server: Running) -> None:
    reply = httpx.get(server.url + "/")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["cache-control"] == "no-cache"
    assert httpx.head(server.url + "/").headers["etag"] == reply.headers["etag"]


def test_a_file_that_the_browser_has_is_not_sent_again(server: Running) -> None:
    for name, file in FILES.items():
        url = f"{server.url}/page/{name}"
        first = httpx.get(url)
        assert first.content == file.content, name
        again = httpx.get(url, headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert httpx.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    assert httpx.get(server.url + "/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/page.py", "/page/../page.py", "/page/..%2fpage.py", "/page/%2e%2e/page.py", "/page//etc/passwd",
     "/page/app.js%00", "/page/app.js/", "/page/APP.JS", "/page/constructor", "/index.html"],
)  # fmt: skip
def test_no_other_path_leads_to_a_file(server: Running, path: str) -> None:
    # httpx would tidy the path up; raw bytes go out as they are.
    with httpx.Client(base_url=server.url) as client:
        reply = client.send(client.build_request("GET", httpx.URL(server.url, raw_path=path.encode())))
    assert reply.status_code == 404 and reply.json()["error"]["message"]


def test_all_files_of_the_folder_are_served_and_each_is_used() -> None:
    folder = {path.name for path in files("mia_serve.http").joinpath("page_files").iterdir()}
    assert folder == set(FILES)
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)"', TEXTS["index.html"]))
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert named | {"index.html"} == folder


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup() -> None:
    for name, text in TEXTS.items():
        assert not re.search(r"(?<!xmlns=\")https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", text), name
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", TEXTS["index.html"])
    dangerous = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|javascript:"
    )
    for name, text in SCRIPTS.items():
        assert not re.search(dangerous, text), name


def test_both_languages_say_everything() -> None:
    words = {}
    for language, following in (("en", "  zh: {"), ("zh", "};")):
        part = TEXTS["strings.js"].partition(f"  {language}: {{")[2].partition(f"\n{following}")[0]
        pairs = re.findall(r'(\w+): "((?:[^"\\]|\\.)*)"', part)
        words[language] = {key: sorted(re.findall(r"\{\w+\}", text)) for key, text in pairs}
        assert len(pairs) == len(words[language]) > 100 and all(text for _, text in pairs)
    assert words["en"] == words["zh"]
    used = set(re.findall(r'data-t(?:-placeholder)?="(\w+)"', TEXTS["index.html"]))
    for name, text in SCRIPTS.items():
        if name != "strings.js":
            used |= set(re.findall(r'"(\w+)"', text)) & set(words["en"])
    assert set(words["en"]) <= used
    for text in SCRIPTS.values():
        assert set(re.findall(r'\bt\("(\w+)"', text)) <= set(words["en"])
    assert set(re.findall(r'data-t(?:-placeholder)?="(\w+)"', TEXTS["index.html"])) <= set(words["en"])
