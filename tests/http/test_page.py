"""The page at `/`, in a real browser, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mia_serve.http.keys import add_key
from tests.http.browser import CHROMIUM, Tab, browsing, choose, click, network, overflows, shown, texts, write
from tests.http.conftest import MakeConfig, Running, serving
from tests.llm.server import Pieces
from tests.llm.server import serving as serving_llm
from tests.rag.agent_world import is_update
from tests.rag.agent_world import reply as update

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
BOOK = "\n\n".join(
    f"{place} {what} on the night of the {day}th, and nobody in the village would say why."
    for day in range(4, 12)
    for place, what in (
        ("Behind the boathouse", "the ferryman counted the lamps"),
        ("Under the floor", "she kept the ledger and the key"),
        (f"At the {HOSTILE} inn", "the doctor asked for a boat"),
        ("在码头上", "他找到了那本账"),
    )
)
ANSWER = "The ferryman kept it, <b>under</b> the floor."
DONE = "!document.getElementById('go').classList.contains('stop')"


def reply(body: dict[str, Any]) -> Any:
    """Update the agent's state as a model would, once to look further; write the answer slowly."""
    if "Who broke the model?" in json.dumps(body["messages"]):
        return 500
    if not is_update(body):
        return Pieces([word + " " for word in ANSWER.split(" ")], pause=0.03)
    if "Who lit the lamp?" in json.dumps(body["messages"]):
        return update("ANSWER", evidence=[("The ledger is gone.", "P1"), (HOSTILE, "P2")])
    return update("REFINE", "Who lit the lamp?", signature=["S2"], evidence=[("The ledger is gone.", "P1")])


@pytest.fixture(scope="module")
def site(make_config: MakeConfig) -> Iterator[Running]:
    with (
        serving_llm(reply, models=["stub"], context=8192) as llm,
        serving(make_config(llm={"url": llm.url, "model": "stub"})) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    browser.look(1200)
    browser.logged.clear()
    browser.urls.clear()
    yield browser
    browser.js("localStorage.clear(); sessionStorage.clear()")
    network(browser)


@pytest.fixture(scope="module")
def book(site: Running) -> str:
    made = httpx.post(f"{site.url}/v1/collections", json={"id": "boat", "title": "The Boat"})
    assert made.status_code == 201
    body = {"text": BOOK, "book_id": "boat", "title": "The Boat"}
    assert httpx.post(f"{site.url}/v1/collections/boat/chunks", json=body, timeout=60).is_success
    return "boat"


def search(site: Running, collection: str, **asked: Any) -> dict[str, Any]:
    found = httpx.post(f"{site.url}/v1/collections/{collection}/search", json=asked)
    assert found.is_success, found.text
    return found.json()


def ask(tab: Tab, question: str) -> None:
    write(tab, "question", question)
    tab.press("Enter")
    tab.wait(f"{DONE} && (!document.getElementById('hits-box').hidden || !document.getElementById('error').hidden)", 60)


def test_a_text_is_added_asked_and_the_map_lights_up(tab: Tab, site: Running, tmp_path: Path) -> None:
    tab.open(site.url + "/")
    click(tab, "add-open")
    file = tmp_path / "灯 Lamps.txt"
    file.write_text(BOOK, "utf-8")
    tab.choose_file("#file", file)
    assert tab.wait("document.getElementById('name').value") == "灯 Lamps"
    click(tab, "add-go")
    tab.wait("!document.getElementById('add').open && document.getElementById('collection').value === 'lamps'", 60)
    info = httpx.get(f"{site.url}/v1/collections/lamps").json()
    assert info["title"] == "灯 Lamps" and info["chunks"] > 5
    assert tab.js("document.activeElement.id") == "question"
    assert len(texts(tab, ".map .session")) == info["sessions"] and not texts(tab, ".map .lit")

    choose(tab, "answering", "")
    ask(tab, "Who kept the ledger?")
    wanted = {"query": "Who kept the ledger?", "k": 10}
    found = search(site, "lamps", **wanted, signature="coverage", explain=True)
    alone = search(site, "lamps", **wanted, signature="none", encoder="e1")
    lit = tab.js("[...document.querySelectorAll('.map .lit')].map((cell) => cell.dataset.session)")
    assert set(lit) == {entry["session_id"] for entry in found["explanation"]["pool"]}
    # The fill's last number is its opacity.
    opacity = "[c.dataset.session, c.style.fill.match(/[0-9.]+/g).pop()]"
    light = dict(tab.js(f"[...document.querySelectorAll('.map .lit')].map((c) => {opacity})"))
    best = found["explanation"]["pool"][0]["session_id"]
    assert float(light[best]) == max(map(float, light.values())) == 1

    picks = found["signature"]["session_ids"]
    assert len(picks) > 1 and sorted(texts(tab, ".map .number")) == [str(i + 1) for i in range(len(picks))]
    # Each number stands over its own session, and σ's list is in the same order.
    middles = tab.js(
        """(() => {
          const cells = [...document.querySelectorAll(".map .session")].map((c) => [c, c.getBBox()]);
          const under = (x, y) => cells.find(([, box]) =>
            box.x < x && x < box.x + box.width && Math.abs(box.y - y) < 9)[0].dataset.session;
          return Object.fromEntries([...document.querySelectorAll(".map .number")].map((n) =>
            [n.textContent, under(n.x.baseVal[0].value, n.y.baseVal[0].value)]));
        })()"""
    )
    assert [middles[str(i + 1)] for i in range(len(picks))] == picks
    assert [text.split() for text in texts(tab, ".picks p")] == [s.split() for s in found["signature"]["summaries"]]
    gains = [f"adds {gain:.3f}".replace(" 0.", " .").replace("-0.", "-.") for gain in found["signature"]["gains"]]
    assert texts(tab, ".picks .gain > small:first-child") == gains
    assert tab.js("document.querySelectorAll('.picks .stack').length") == len(picks)

    ids = "[...document.querySelectorAll('.side:nth-child(%d) li')].map((li) => li.dataset.id)"
    before, after = tab.js(ids % 1), tab.js(ids % 2)
    assert before == [hit["id"] for hit in alone["hits"]] and after == [hit["id"] for hit in found["hits"]]
    marks = texts(tab, ".side:nth-child(2) .mark")
    for rank, (id, mark) in enumerate(zip(after, marks, strict=True)):
        moved = before.index(id) - rank if id in before else None
        change = f"↑up {moved}" if moved and moved > 0 else f"↓down {-(moved or 0)}"
        assert mark == ("new" if moved is None else change if moved else "same")
    gone = tab.js("[...document.querySelectorAll('.mark.gone')].map((m) => m.closest('li').dataset.id)")
    assert gone == [id for id in before if id not in after]
    assert "10 hits in" in shown(tab, "status") and tab.logged == []
    assert {url.split("/")[2] for url in tab.urls if not url.startswith("about:")} == {site.url.split("/")[2]}


def test_a_collection_is_deleted_only_when_asked_twice(tab: Tab, site: Running) -> None:
    httpx.post(f"{site.url}/v1/collections", json={"id": "old", "title": "Old notes"}).raise_for_status()
    tab.open(f"{site.url}/#old")
    tab.js("document.getElementById('delete').focus()")
    click(tab, "delete")
    assert shown(tab, "delete") == "Delete “Old notes” for good?"
    tab.press("Tab")
    assert shown(tab, "delete") == "Delete…" and httpx.get(f"{site.url}/v1/collections/old").is_success
    tab.press("Tab", shift=True)
    tab.press("Enter")
    tab.press("Enter")
    tab.wait("document.getElementById('status').innerText === 'Deleted.'")
    assert httpx.get(f"{site.url}/v1/collections/old").status_code == 404


def test_hostile_text_stays_text(tab: Tab, site: Running) -> None:
    tab.open(site.url + "/")
    click(tab, "add-open")
    write(tab, "name", HOSTILE)
    tab.js(f"(() => {{ const f = document.getElementById('text'); f.value = {json.dumps(HOSTILE * 3 + BOOK)}; }})()")
    click(tab, "add-go")
    tab.wait("!document.getElementById('add').open", 60)
    tab.wait(f"document.getElementById('collection').selectedOptions[0].text === {json.dumps(HOSTILE)}")
    choose(tab, "answering", "static")
    ask(tab, HOSTILE)
    tab.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    said = tab.js("document.body.innerText")
    assert HOSTILE in said and "<b>under</b>" in said
    assert not tab.js("document.querySelector('main img, main script, dialog img, dialog script') || window.pwned")
    # Even where a script tried, the policy lets no string become markup.
    made = "(() => { try { document.body.innerHTML = '<p>'; return 'made'; } catch { return 'refused'; } })()"
    assert tab.js(made) == "refused"


def test_an_answer_is_written_word_by_word(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    assert tab.js("document.getElementById('collection').value") == book
    tab.js("document.querySelector('.options').open = true")
    choose(tab, "answering", "static")
    tab.js(
        """(() => {
          window.seen = [];
          const keep = () => window.seen.push(document.querySelector(".reply")?.innerText ?? "");
          const what = { childList: true, subtree: true, characterData: true };
          new MutationObserver(keep).observe(document.getElementById("answer"), what);
        })()"""
    )
    ask(tab, "Who kept the ledger?")
    assert texts(tab, ".reply") == [ANSWER]
    seen = {text.strip() for text in tab.js("window.seen")}
    partial = {text for text in seen if text and ANSWER.startswith(text) and text != ANSWER}
    assert len(partial) > 2
    assert len(texts(tab, ".passages .hits li")) > 0 and texts(tab, ".steps li") == []


def test_the_agents_steps_are_shown(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    choose(tab, "answering", "agent")
    ask(tab, "Who kept the ledger?")
    first, second, *_ = texts(tab, ".steps > li")
    for part in (
        "Step 1 looks for: Who kept the ledger?",
        "σ starts with §",
        "10 chunks found",
        "The ledger is gone.",
    ):
        assert part in first
    assert "Decision: look further → Who lit the lamp?" in first
    assert "Who lit the lamp?" in second and "σ lost" in second and HOSTILE in second
    assert "The ledger is gone." not in second and "Decision: enough: answer" in second
    # The map shows the last step's σ, a click another one's.
    assert len(texts(tab, ".map .number")) == 1
    tab.js("document.querySelector('.steps button').click()")
    assert len(texts(tab, ".map .number")) == first.count("§")
    assert texts(tab, ".reply") == [ANSWER]
    assert "show it on the map again" in shown(tab, "sigma-box")
    click(tab, "sigma-show")
    assert "show it on the map again" not in shown(tab, "sigma-box")


def test_a_model_that_fails_is_told_and_the_hits_stay(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    choose(tab, "answering", "static")
    ask(tab, "Who broke the model?")
    assert "The language model does not answer now" in shown(tab, "answer-box") + shown(tab, "error")
    assert "Reading…" not in shown(tab, "answer-box") and len(texts(tab, ".hits li")) == 20


def test_everything_can_be_done_with_the_keyboard(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    choose(tab, "answering", "")
    seen = []
    for _ in range(8):
        tab.press("Tab")
        style = "getComputedStyle(document.activeElement)"
        assert tab.js(f"{style}.outlineStyle + {style}.outlineWidth") == "solid2px"
        seen.append(tab.js("document.activeElement.id || document.activeElement.className"))
    assert seen == ["skip", "key-open", "language", "collection", "add-open", "delete", "question", "go"]
    tab.press("Tab", shift=True)
    tab.type("Who kept")
    tab.press("Enter", shift=True)
    tab.type("the ledger?")
    assert tab.js("document.getElementById('question').value") == "Who kept\nthe ledger?"
    assert shown(tab, "hits") == ""
    tab.press("Enter")
    tab.wait(f"{DONE} && !document.getElementById('hits-box').hidden", 60)
    for _ in range(3):
        tab.press("Tab")
    assert tab.js("document.activeElement.getAttribute('role')") == "listbox"
    first = tab.js("document.activeElement.getAttribute('aria-activedescendant')")
    tab.press("ArrowRight" if first == "cell-0" else "ArrowLeft")
    second = tab.js("document.activeElement.getAttribute('aria-activedescendant')")
    assert first != second and "Session" in tab.js(f"document.getElementById('{second}').getAttribute('aria-label')")
    tab.press("Enter")
    assert "Session" in shown(tab, "session") and tab.js("document.getElementById('session').ariaLive") == "polite"
    assert tab.js(f"document.getElementById('{second}').getAttribute('aria-selected')") == "true"
    tab.press("Escape")
    assert shown(tab, "session") == "" and tab.js("document.activeElement.getAttribute('role')") == "listbox"
    # A hit opens with Enter too.
    tab.js("document.querySelector('.hits summary').focus()")
    tab.press("Enter")
    assert tab.js("document.querySelector('.hits details').open")
    # The dialog keeps the focus, and gives it back.
    tab.js("document.getElementById('add-open').focus()")
    tab.press("Enter")
    assert tab.js("document.getElementById('add').open && document.activeElement.id") == "name"
    tab.press("Escape")
    assert tab.js("!document.getElementById('add').open && document.activeElement.id") == "add-open"


def test_escape_stops_a_question(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    network(tab, latency=3000)
    write(tab, "question", "Who?")
    tab.press("Enter")
    tab.wait("document.getElementById('go').classList.contains('stop')")
    assert shown(tab, "status") == "Searching…" and shown(tab, "go") == "Stop"
    tab.press("Escape")
    tab.wait(DONE)
    assert shown(tab, "status") == "Stopped." and shown(tab, "error") == "" and shown(tab, "answer-box") == ""


@pytest.mark.parametrize("width", [360, 320])
def test_a_narrow_screen_never_scrolls_sideways(tab: Tab, site: Running, book: str, width: int) -> None:
    tab.look(width, 640)
    tab.open(f"{site.url}/#{book}")
    assert overflows(tab) == []
    choose(tab, "answering", "agent")
    ask(tab, "Who kept " + "theledger" * 40)
    tab.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    tab.js("document.querySelector('.map .session').dispatchEvent(new MouseEvent('click'))")
    click(tab, "key-open")
    assert "Session" in shown(tab, "session") and overflows(tab) == []
    click(tab, "add-open")
    assert overflows(tab) == [] and tab.js("document.getElementById('add').getBoundingClientRect().right") <= width
    # What is touched is large enough.
    touched = "[...document.querySelectorAll('button:not(.link), select')].filter((b) => b.checkVisibility())"
    assert min(tab.js(f"{touched}.map((b) => b.offsetHeight)")) >= 28


def test_the_page_speaks_chinese(tab: Tab, site: Running, book: str) -> None:
    tab.look(1200, language="zh-CN")
    tab.open(f"{site.url}/#{book}")
    assert tab.js("document.documentElement.lang") == "zh-CN" and "问一本书" in texts(tab, "h1")
    choose(tab, "answering", "")
    ask(tab, "谁藏了账本？")
    assert "秒找到 10 条" in shown(tab, "status") and "签名 σ" in shown(tab, "sigma-box")
    english = tab.js(
        "[...document.querySelectorAll('[data-t], .legend span, .mark, h2, h3')].filter((n) => n.checkVisibility())"
        ".map((n) => n.innerText).filter((text) => text && !/[一-鿿]/.test(text))"
    )
    assert english == []
    click(tab, "language")
    assert "10 hits in" in shown(tab, "status") and texts(tab, "h1") == ["Ask a book"]
    tab.open(f"{site.url}/#{book}")
    assert tab.js("document.documentElement.lang") == "en"  # it was chosen, so it stays


def test_a_chinese_file_of_another_encoding_is_read(tab: Tab, site: Running, tmp_path: Path) -> None:
    tab.open(site.url + "/")
    click(tab, "add-open")
    text = "他在码头上找到了那本账。" * 50
    for name, encoding in (("old", "gb18030"), ("wide", "utf-16"), ("new", "utf-8-sig")):
        file = tmp_path / f"{name}.txt"
        file.write_bytes(text.encode(encoding))
        tab.choose_file("#file", file)
        tab.wait(f"document.getElementById('name').value === '{name}'")
        assert tab.js("document.getElementById('text').value") == text
    (tmp_path / "cover.txt").write_bytes(bytes(range(256)) * 40)
    tab.choose_file("#file", tmp_path / "cover.txt")
    tab.wait("!document.getElementById('add-error').hidden")
    assert "not plain text" in shown(tab, "add-error")


def test_parts_are_cut_at_ends_and_lose_nothing(tab: Tab, site: Running) -> None:
    tab.open(site.url + "/")
    tab.js("import('./page/add.js').then((m) => { window.add = m; })")

    def parts(text: str, most: int) -> list[str]:
        cut = f"for (let from = 0; from < text.length; from = ends.at(-1)) ends.push(add.partEnd(text, from, {most}));"
        show = "ends.map((end, i) => text.slice(ends[i - 1] ?? 0, end))"
        return tab.js(f"(() => {{ const text = {json.dumps(text)}, ends = []; {cut} return {show}; }})()")

    cut = ["One ends.\n\n", "Two goes on. ", "Three is last."]
    assert parts("".join(cut), 20) == cut
    assert parts("他来了。他又走了。雨停了。", 7) == ["他来了。", "他又走了。", "雨停了。"]
    assert parts("😀" * 9, 7) == ["😀" * 3] * 3 and parts("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    titles = ["Émile & Co.", "红楼梦", "a" * 200, "---"]
    ids = tab.js(f"{json.dumps(titles)}.map((title) => add.idFor(title, new Set(['text'])))")
    assert ids == ["emile-co", "text-2", "a" * 50, "text-2"]


def test_a_stream_is_read_however_it_is_cut(tab: Tab, site: Running) -> None:
    tab.open(site.url + "/")
    events = 'event: token\r\ndata: {"text":"账"}\r\n\r\n: still here\r\n\r\n'
    events += 'event: answer\ndata: {"a":\ndata: 1}\n\ndata: {}'
    took = tab.js(
        f"""(async () => {{
          const bytes = new TextEncoder().encode({json.dumps(events)}), all = [], own = window.fetch;
          for (const size of [1, 2, 3, 7, 999]) {{
            const body = new ReadableStream({{ start(c) {{
              for (let i = 0; i < bytes.length; i += size) c.enqueue(bytes.slice(i, i + size));
              c.close();
            }} }});
            window.fetch = async () => new Response(body);
            const got = [];
            await (await import("./page/api.js")).stream("v1/answer", {{}}, (name, data) => got.push([name, data]));
            all.push(got);
          }}
          window.fetch = own;
          return all;
        }})()"""
    )
    assert took == [[["token", {"text": "账"}], ["answer", {"a": 1}], ["message", {}]]] * 5


def test_a_key_is_asked_for_and_kept_in_the_tab_only(tab: Tab, make_config: MakeConfig, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    _, secret = add_key(keys, "page", "read")
    with serving(make_config(keys=keys)) as running:
        tab.open(running.url + "/")
        assert "asks for a key" in shown(tab, "error") and tab.js("document.activeElement.id") == "key"
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.getElementById('error').innerText.includes('does not accept')")
        write(tab, "key", secret)
        tab.press("Enter")
        tab.wait("document.getElementById('error').hidden && document.getElementById('key-box').hidden")
        assert "holds no text yet" in shown(tab, "about")
        kept = tab.js("[Object.values(sessionStorage), Object.values(localStorage), document.cookie, location.href]")
        assert kept[0] == [secret] and secret not in json.dumps(kept[1:]) and not any(secret in url for url in tab.urls)
        click(tab, "add-open")
        write(tab, "text", "The ferryman counted the lamps.")
        click(tab, "add-go")
        tab.wait("!document.getElementById('add-error').hidden")
        assert "may not do that" in shown(tab, "add-error") and "'write'" in shown(tab, "add-error")


def test_what_goes_wrong_is_told_in_words(tab: Tab, site: Running, book: str) -> None:
    tab.open(f"{site.url}/#{book}")
    choose(tab, "answering", "")
    write(tab, "question", "  ")
    tab.press("Enter")
    assert shown(tab, "error") == "Write a question first."
    network(tab, offline=True)
    write(tab, "question", "Who kept the ledger?")
    tab.press("Enter")
    tab.wait(f"{DONE} && !document.getElementById('error').hidden")
    assert "The server does not answer" in shown(tab, "error")
    network(tab)
    ask(tab, "Who kept the ledger?")
    assert shown(tab, "error") == "" and shown(tab, "hits") != ""
    click(tab, "add-open")
    tab.js("document.getElementById('text').value = ''")
    click(tab, "add-go")
    assert shown(tab, "add-error") == "Choose a file or paste a text first."


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_in_light_and_dark(tab: Tab, site: Running, dark: bool) -> None:
    tab.look(1200, dark=dark)
    tab.open(site.url + "/")
    colours = tab.js(
        "['ink', 'soft', 'sigma', 'after', 'good', 'bad', 'paper', 'card', 'rail'].map((name) => {"
        " const p = document.createElement('p'); p.style.color = `var(--${name})`; document.body.append(p);"
        " const c = getComputedStyle(p).color.match(/[0-9.]+/g).map(Number); p.remove(); return [name, c]; })"
    )
    rgb = dict(colours)

    def light(name: str) -> float:
        parts = [c / 255 for c in rgb[name]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert (light("paper") < light("ink")) == dark
    for name in ("ink", "soft", "sigma", "after", "good", "bad"):
        for ground in ("paper", "card"):
            low, high = sorted((light(name), light(ground)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
