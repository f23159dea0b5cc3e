"""Summaries written by a model: what it is asked, what becomes of its replies, failures, kills and replay."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_serve.core import MiaError
from mia_serve.llm import Budget, ChatClient, LlmFailed, ReplyCache
from mia_serve.mindscape.fitting import estimate_tokens, group_texts
from mia_serve.mindscape.records import Window
from mia_serve.mindscape.replies import clean_reply
from mia_serve.mindscape.sentences import count_words
from mia_serve.mindscape.written import (
    LlmSummariser,
    Written,
    window_messages,
    write_book_summaries,
    write_summaries,
)
from tests.llm.server import serving


def windows(n: int, book: str = "b") -> list[Window]:
    return [Window((f"Anna walks to town {i}.", "She is tired."), "The Tide", book, i + 1, n) for i in range(n)]


def place(body: dict[str, Any]) -> str:
    """Say what a request is about: `Part 3` and so on."""
    found = re.search(r"(?:Part|Session) \d+", body["messages"][-1]["content"])
    return found[0] if found else "none"


def echo(body: dict[str, Any]) -> str:
    return f"Anna reached {place(body)}."


def write(url: str | None, some: Sequence[Window], fallback: Any = None, **options: Any) -> tuple[Written, ChatClient]:
    own = {k: options.pop(k) for k in ("chat", "context_tokens", "max_tokens") if k in options}

    async def run() -> tuple[Written, ChatClient]:
        async with ChatClient(url, "m", **({"max_retries": 0} | options)) as client:
            return await write_summaries(client, some, fallback, **own), client

    return asyncio.run(run())


def write_books(url: str, parts: list[list[str]], titles: list[str], **own: Any) -> Written:
    async def run() -> Written:
        async with ChatClient(url, "m", max_retries=0) as client:
            return await write_book_summaries(client, parts, titles, **own)

    return asyncio.run(run())


def stand_ins(failed: Sequence[Window]) -> list[str]:
    return [f"stand-in {w.part}" for w in failed]


def test_the_prompt_asks_for_what_the_papers_ask_for():
    window = Window(("It was dark.\n\nAnna ran.", "Page 7"), "The  Tide", "b", 3, 7)
    system, user = window_messages(window)
    assert system["role"] == "system" and "expert editor of fiction" in system["content"]
    assert "continuity" in system["content"]
    asked = user["content"]
    assert "Part 3 / 7 of “The Tide”" in asked and "<text>\nIt was dark.\n\nAnna ran.\n\nPage 7\n</text>" in asked
    for wanted in (
        "third person and the past tense",
        "no list",
        "names they bear",
        "stand to each other",
        "dialogue that moves the plot",
        "places",
        "licences",
        "page numbers",
        "tables of contents",
        "broken piece",
        "no words about the text",
        "50 to 100 words",
        "summary and nothing else",
        "in the language of the text",
    ):
        assert wanted in asked, wanted


def test_the_prompt_of_a_chat_asks_for_its_facts_and_dates():
    window = Window(("Ann: I move on Friday.", "Bob: Good luck!"), "Ann and Bob", "c", 2, 4, "8 May 2023")
    system, user = window_messages(window, chat=True)
    assert "records of long conversations" in system["content"]
    assert "Session 2 / 4 of the conversation “Ann and Bob”, dated 8 May 2023." in user["content"]
    assert "Ann: I move on Friday.\n\nBob: Good luck!" in user["content"]
    for wanted in ("decisions", "dates", "by name", "yesterday", "One connected paragraph", "50 to 100 words"):
        assert wanted in user["content"], wanted


def test_summaries_are_in_order_and_as_many_calls_under_way_as_the_client_lets_through():
    with serving(echo, delay=0.1) as stub:
        written, client = write(stub.url, windows(24), concurrency=8)
    assert written == Written([f"Anna reached Part {i}." for i in range(1, 25)], {})
    assert stub.most_at_once == 8 and client.stats.calls == 24


def test_no_windows_are_no_calls():
    with serving(echo) as stub:
        assert write(stub.url, [])[0] == Written([], {})
        assert write_books(stub.url, [], []) == Written([], {})
    assert stub.requests == []


def test_windows_that_fail_get_the_fallback_in_one_call_and_are_counted():
    odd: dict[str, Any] = {"Part 2": 400, "Part 4": ("", "stop"), "Part 5": ("Anna", "length"), "Part 7": "<think>hm"}
    asked: list[list[int]] = []

    def fallback(failed: Sequence[Window]) -> list[str]:
        asked.append([w.part for w in failed])
        return stand_ins(failed)

    with serving(lambda body: odd.get(place(body), echo(body))) as stub:
        written, _ = write(stub.url, windows(8), fallback)
    assert asked == [[2, 4, 5, 7]]
    assert written.failures == {
        ("b", 2): "http 400",
        ("b", 4): "no content",
        ("b", 5): "truncated",
        ("b", 7): "bad reply",
    }
    expected = {i: f"Anna reached Part {i}." for i in (1, 3, 6, 8)} | {i: f"stand-in {i}" for i in (2, 4, 5, 7)}
    assert written.summaries == [expected[i] for i in range(1, 9)]


def test_without_a_fallback_a_failed_window_is_an_error_but_the_others_are_recorded(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    told = pytest.raises(LlmFailed, match=r"1 of 6 windows have no summary \(http 400 1\)")
    with serving(lambda body: 400 if place(body) == "Part 2" else echo(body)) as stub, told as caught:
        write(stub.url, windows(6), cache=ReplyCache(file))
    assert caught.value.label == "http 400"
    with serving(echo) as stub:
        assert write(stub.url, windows(6), cache=ReplyCache(file))[0].failures == {}
    assert [place(body) for body in stub.requests] == ["Part 2"]


def test_a_fallback_that_returns_another_number_is_named():
    with serving(lambda body: 400) as stub, pytest.raises(MiaError, match="0 summaries for 2 windows"):
        write(stub.url, windows(2), lambda failed: [])


@pytest.mark.parametrize("trouble", ["refused", "budget", "gone"])
def test_what_no_window_can_do_stops_all_at_once_and_keeps_the_answers(tmp_path: Path, trouble: str):
    file = tmp_path / "c.jsonl"

    def answer(body: dict[str, Any]) -> Any:
        if trouble == "refused" and int(place(body).split()[1]) > 4:
            return 401
        return echo(body)

    budget = Budget(max_calls=4) if trouble == "budget" else None
    fallback_calls: list[Any] = []
    with serving(answer, delay=0.02) as stub:
        url = "http://127.0.0.1:9/v1" if trouble == "gone" else stub.url
        with pytest.raises(LlmFailed) as caught:
            write(url, windows(200), fallback_calls.append, concurrency=4, cache=ReplyCache(file), budget=budget)
    assert caught.value.hopeless and not fallback_calls
    assert len(stub.requests) <= 12
    recorded = [line for line in file.read_text().splitlines() if "Anna" in line] if file.exists() else []
    assert len(recorded) == (0 if trouble == "gone" else 4)


def test_an_endpoint_that_fails_ten_times_in_a_row_is_taken_for_down():
    with serving(lambda body: 503) as stub:
        with pytest.raises(LlmFailed) as caught:
            write(stub.url, windows(100), stand_ins, concurrency=2)
        assert write(stub.url, windows(9), stand_ins)[0].summaries == stand_ins(windows(9))
    assert caught.value.label == "http 503" and len(stub.requests) <= 12 + 9


def test_replay_does_not_give_up_where_the_recording_did_not(tmp_path: Path):
    file, many = tmp_path / "c.jsonl", windows(30)
    # One at a time, bad ones between good ones, as it may come where many are under way; replay has the bad ones first.
    mixed = [window for pair in zip(many[:15], many[15:], strict=True) for window in pair]
    bad = [f"Part {window.part}" for window in many[:15]]
    with serving(lambda body: 500 if place(body) in bad else echo(body)) as stub:
        first, _ = write(stub.url, mixed, stand_ins, cache=ReplyCache(file), concurrency=1)
    again, _ = write(None, many, stand_ins, cache=ReplyCache(file, "replay"))
    assert sorted(again.summaries) == sorted(first.summaries) and again.failures == first.failures
    assert len(again.failures) == 15


def test_EVL_16_replay_makes_no_call_and_other_words_are_not_recorded(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(lambda body: 400 if place(body) == "Part 3" else echo(body)) as stub:
        first, _ = write(stub.url, windows(5), stand_ins, cache=ReplyCache(file))
    again, client = write(None, windows(5), stand_ins, cache=ReplyCache(file, "replay"))
    assert again == first and client.stats.calls == 0 and first.failures == {("b", 3): "http 400"}
    with pytest.raises(LlmFailed) as caught:
        write(None, windows(6), stand_ins, cache=ReplyCache(file, "replay"))
    assert caught.value.reason == "not recorded"


LONG = Window(
    tuple(f"Anna meets guest {i}. " + "They talk at length about the sea. " * 60 for i in range(20)), "T", "b"
)


def test_a_window_that_the_context_cannot_hold_is_summed_up_in_pieces():
    sizes: list[int] = []

    def answer(body: dict[str, Any]) -> str:
        asked = body["messages"][-1]["content"]
        sizes.append(sum(estimate_tokens(m["content"]) for m in body["messages"]) + body["max_tokens"])
        guests = re.findall(r"guest \d+", asked)
        return f"Anna met {', '.join(guests)}."

    with serving(answer) as stub:
        first, client = write(stub.url, [LONG], context_tokens=4096)
        second, _ = write(stub.url, [LONG], context_tokens=4096)
        whole, other = write(stub.url, [LONG], context_tokens=100_000)
    assert first == second, "the same pieces each time"
    assert first.summaries == ["Anna met " + ", ".join(f"guest {i}" for i in range(20)) + "."], "all, in order"
    assert client.stats.calls > 3 and max(sizes[: client.stats.calls]) <= 4096
    assert whole.summaries == first.summaries and other.stats.calls == 1
    assert "summaries of consecutive pieces" in stub.requests[client.stats.calls - 1]["messages"][-1]["content"]


def test_the_context_is_what_the_endpoint_says_and_replay_cuts_the_same_pieces(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(lambda body: f"Anna spoke, {len(str(body))}.", models=["m"], context=4096) as stub:
        first, client = write(stub.url, [LONG], cache=ReplyCache(file))
        sizes = [sum(estimate_tokens(m["content"]) for m in b["messages"]) + b["max_tokens"] for b in stub.requests]
        assert max(sizes) <= 4096 and len(sizes) == client.stats.calls > 3
        again, client = write(None, [LONG], cache=ReplyCache(file, "replay"))
        assert again == first and client.stats.calls == 0


def test_a_window_that_the_endpoint_calls_too_long_is_halved_until_it_fits():
    def answer(body: dict[str, Any]) -> Any:
        asked = body["messages"][-1]["content"]
        if len(asked) > 15_000:
            return 400, "This model's maximum context length is 4096 tokens."
        return f"Anna met {', '.join(re.findall(r'guest [0-9]+', asked))}."

    with serving(answer) as stub:
        written, client = write(stub.url, [LONG], context_tokens=100_000)
    assert written.summaries == ["Anna met " + ", ".join(f"guest {i}" for i in range(20)) + "."]
    # Whole, two halves, four quarters, one to join them.
    assert client.stats.calls == 8


def test_a_context_that_holds_not_even_the_instructions_is_an_error_that_says_so():
    with serving(echo) as stub, pytest.raises(MiaError, match="a context of 500 tokens is too small"):
        write(stub.url, windows(1), context_tokens=500)
    assert stub.requests == []


@given(st.lists(st.text(max_size=400), min_size=1, max_size=8), st.integers(40, 300))
def test_groups_hold_all_texts_in_order_and_fit(texts: list[str], room: int):
    groups = group_texts(texts, room)
    kept = "".join("".join(group) for group in groups)
    assert "".join(kept.split()) == "".join("".join(texts).split())
    for group in groups:
        assert sum(estimate_tokens(t) for t in group) <= room


CHINESE = Window(("第一回　甄士隐梦幻识通灵。", "士隐道：“你去罢！”雨村笑而不语。"), "红楼梦", "hlm", 1, 6)


def test_a_chinese_window_goes_and_comes_in_chinese():
    said = (
        "以下是本章摘要：\n“士隐在姑苏城中遇见雨村，\n二人相谈。士隐赠银五十两，雨村次日便进京赶考去了。”（字数：40）"
    )
    with serving(lambda body: said) as stub:
        written, _ = write(stub.url, [CHINESE])
    assert written.summaries == ["士隐在姑苏城中遇见雨村，二人相谈。士隐赠银五十两，雨村次日便进京赶考去了。"]
    asked = stub.requests[0]["messages"][-1]["content"]
    assert "“红楼梦”" in asked and "雨村笑而不语" in asked and "80 to 160 characters" in asked


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ("  Anna went\n home. ", "Anna went home."),
        ("<think>They want a summary: short.</think>\n\nAnna went home.", "Anna went home."),
        ("no opening tag</think>Anna went home.", "Anna went home."),
        ("```text\nAnna went home.\n```", "Anna went home."),
        ("Here you are:\n```\nAnna went home.\n```", "Anna went home."),
        ("**Summary:** Anna went home.", "Anna went home."),
        ("# Summary\n\nAnna went home.", "Anna went home."),
        ('Here is the summary of Part 3 / 7:\n\n"Anna went home."', "Anna went home."),
        ("Sure! Here's a summary:\n\nAnna went home.\n\nWord count: 3", "Anna went home."),
        ("<summary>Anna went home.</summary>", "Anna went home."),
        ('{"summary": "Anna went home."}', "Anna went home."),
        ('```json\n{"text": "Anna went home."}\n```', "Anna went home."),
        ("- Anna went home.\n- Bob stayed.", "Anna went home. Bob stayed."),
        ("1. Anna went home.\n2. Bob stayed.", "Anna went home. Bob stayed."),
        ('"Go," said Anna, and "Stay," said Bob.', '"Go," said Anna, and "Stay," said Bob.'),
        ("Anna read: the summary of all. 7 men came.", "Anna read: the summary of all. 7 men came."),
        ("Anna\x00 went\x07 home.", "Anna went home."),
        ("Zusammenfassung: Anna ging heim.", "Anna ging heim."),
        ("Краткое содержание: Анна ушла.", "Анна ушла."),
        ("总结：安娜回家了。\n\n她哭了。", "安娜回家了。她哭了。"),
    ],
)
def test_SRV_26_what_a_model_wraps_around_a_summary_is_taken_off(reply: str, summary: str):
    assert clean_reply(reply, 200, 1600) == summary


@pytest.mark.parametrize(
    "reply",
    [
        "",
        " \n",
        "…!?",
        "<think>and then",
        "```\n```",
        "[1, 2]",
        '{"a": "x", "b": "y"}',
        '{"summary": "Anna we',
        "ab " * 9000,
    ],
)
def test_a_reply_without_a_summary_is_a_typed_failure(reply: str):
    with pytest.raises(LlmFailed) as caught:
        clean_reply(reply, 200, 1600)
    assert caught.value.reason == "bad reply" and len(str(caught.value)) < 300


def test_a_reply_that_is_too_long_is_cut_at_the_end_of_a_sentence():
    text = clean_reply(" ".join(f"Anna went to town {i} and back." for i in range(60)), 200, 1600)
    assert text == " ".join(f"Anna went to town {i} and back." for i in range(28)), "28 sentences of 7 words are 196"
    chinese = clean_reply("".join(f"安娜去第{i}城。" for i in range(10, 99)), 200, 1600)
    assert chinese == "".join(f"安娜去第{i}城。" for i in range(10, 43)), "5 characters and a number each"
    assert clean_reply("word " * 900, 200, 1600) == " ".join(["word"] * 200), "no sentence ends"
    assert clean_reply("x" * 9000, 200, 1600) == "x" * 1600


def test_what_a_weak_model_repeats_is_said_once():
    assert (
        clean_reply("A lady was lost.\n\nShe cried.\n\n" * 9 + "A lady", 200, 1600)
        == "A lady was lost. She cried. A lady"
    )
    assert clean_reply("士隐大喜。" * 50 + "雨村也笑了。", 200, 1600) == "士隐大喜。雨村也笑了。"


wrappers = st.sampled_from(
    [
        "{}",
        "<think>{}</think>{}",
        "```json\n{}\n```",
        '{{"summary": "{}"}}',
        "[{}]",
        "Summary: {}",
        "“{}”",
        "{}\n\n{}",
        "# {}",
    ]
)
scraps = st.one_of(
    st.text(max_size=300),
    st.text(st.characters(codec=None, categories=("Cc", "Cs", "Cf", "Lo", "Po")), max_size=200),
    st.sampled_from(
        ["安娜回家了。" * 50, "The sea. " * 11_000, "word " * 500, "مرحبا بالعالم", '{"summary": ', "\ud800", "```"]
    ),
    st.recursive(st.none() | st.text(max_size=20) | st.integers(), st.lists, max_leaves=5).map(json.dumps),
)


@settings(max_examples=400, deadline=None)
@given(wrappers, scraps, scraps)
def test_no_reply_crashes_and_every_summary_is_a_bounded_line(wrapper: str, one: str, two: str):
    reply = wrapper.format(one, two)
    try:
        summary = clean_reply(reply, 200, 1600)
    except LlmFailed as failure:
        assert failure.reason == "bad reply"
        return
    assert 0 < len(summary) <= 1600 and count_words(summary) <= 200
    assert summary == " ".join(summary.split()) and any(c.isalnum() for c in summary)
    summary.encode("utf-8")


def test_fuzzed_replies_of_a_server_are_summaries_or_counted():
    odd = [
        "安" * 120_000,
        "{" * 5000,
        '{"summary": 5}',
        "\x00\x01",
        "\ud83d Anna",
        "Ok.",
        "```",
        "<think>" * 50,
        b"\xff\xfe",
        b"{}",
    ]
    with serving(lambda body: odd[int(place(body).split()[1]) - 1]) as stub:
        written, _ = write(stub.url, windows(len(odd)), stand_ins, concurrency=1)
    assert all(written.summaries) and len(written.summaries) == len(odd)
    assert {part for _, part in written.failures} == {1, 2, 3, 4, 7, 8, 9, 10}
    assert set(written.failures.values()) == {"bad reply", "bad response"}


def test_a_book_is_summed_up_out_of_its_parts_in_order():
    with serving(lambda body: f"It was about {len(body['messages'][-1]['content'])}.") as stub:
        written = write_books(stub.url, [["Anna left.", "Anna came back."], ["Bob slept."]], ["The Tide", ""])
    assert len(written.summaries) == 2 and written.failures == {} and len(stub.requests) == 2, "one session too"
    asked = next(b["messages"][-1]["content"] for b in stub.requests if "The Tide" in b["messages"][-1]["content"])
    assert '<summary part="1">\nAnna left.\n</summary>\n<summary part="2">\nAnna came back.\n</summary>' in asked
    for wanted in ("complete abstract", "matters most", "how it ends", "200 to 800 words", "third person"):
        assert wanted in asked, wanted


def test_a_book_whose_parts_do_not_fit_is_summed_up_in_stretches():
    parts = [f"Guest {i} came to Anna's house. " + "They spoke of the sea and of the war. " * 8 for i in range(60)]

    def answer(body: dict[str, Any]) -> str:
        assert sum(estimate_tokens(m["content"]) for m in body["messages"]) + body["max_tokens"] <= 4096
        return ". ".join(dict.fromkeys(re.findall(r"Guest \d+", body["messages"][-1]["content"]))) + "."

    with serving(answer) as stub:
        written = write_books(stub.url, [parts], ["T"], context_tokens=4096)
    assert written.summaries == [". ".join(f"Guest {i}" for i in range(60)) + "."]
    assert sum("summary of this stretch" in b["messages"][-1]["content"].replace("\n", " ") for b in stub.requests) >= 3


def test_books_that_fail_are_empty_and_counted():
    with serving(lambda body: 400 if "Tide" in body["messages"][-1]["content"] else "Bob slept.") as stub:
        written = write_books(stub.url, [["Anna left."], ["Bob slept."]], ["The Tide", "Bob"])
    assert written == Written(["", "Bob slept."], {("0", 0): "http 400"})
    with pytest.raises(MiaError, match="2 books but 1 titles"):
        write_books(stub.url, [["a"], ["b"]], ["t"])
    with pytest.raises(MiaError, match=r"book 1 \('u'\) has no text"):
        write_books(stub.url, [["a"], [" "]], ["t", "u"])


def test_per_chunk_sums_up_every_chunk_in_under_500_characters_first():
    def answer(body: dict[str, Any]) -> Any:
        asked = body["messages"][-1]["content"]
        if "Sum up this passage" not in asked:
            return "All of it."
        if "licence" in asked.split("</text>")[0]:
            return "None."
        return 400 if "BROKEN" in asked else " ".join(f"Anna walked {i}." for i in range(10, 90))

    with serving(answer) as stub:
        chunks = [["The licence of this book.", "Anna walked.", "BROKEN"], ["The licence of that book."]]
        written = write_books(stub.url, chunks, ["T", "U"], per_chunk=True)
    assert written == Written(["All of it.", ""], {("0", 3): "http 400", ("1", 0): "no content"})
    (asked,) = [
        b["messages"][-1]["content"] for b in stub.requests if "complete abstract" in b["messages"][-1]["content"]
    ]
    (part,) = re.findall(r'<summary part="\d+">\n(.*)\n</summary>', asked)
    assert part == " ".join(f"Anna walked {i}." for i in range(10, 41)) and len(part) < 500


def test_the_summariser_is_called_like_any_other_also_inside_a_running_loop():
    with serving(lambda body: 400 if place(body) == "Part 2" else echo(body)) as stub:
        with LlmSummariser(ChatClient(stub.url, "m", max_retries=0), stand_ins) as summarise:
            assert summarise.summarizer == "llm(m)"
            assert summarise(windows(3)) == ["Anna reached Part 1.", "stand-in 2", "Anna reached Part 3."]

            async def inside() -> list[str]:
                return summarise(windows(2, "c"))

            assert asyncio.run(inside()) == ["Anna reached Part 1.", "stand-in 2"]
            assert summarise.chats(windows(1)) == ["Anna reached Session 1."]
            assert summarise.book_summaries([["Anna left."]], ["T"]) == ["Anna reached none."]
            assert summarise.failures == {("b", 2): "http 400", ("c", 2): "http 400"}
            assert summarise.summarizer == "llm(m; 2 of 6 not: http 400 2)"
        summarise.close()
        with pytest.raises(MiaError, match="closed"):
            summarise(windows(1))


def test_the_summariser_stops_what_is_under_way_when_the_endpoint_refuses():
    with (
        serving(lambda body: 401 if place(body) == "Part 1" else echo(body), delay=0.05) as stub,
        LlmSummariser(ChatClient(stub.url, "m", concurrency=4), stand_ins) as summarise,
        pytest.raises(LlmFailed) as caught,
    ):
        summarise(windows(100))
    assert caught.value.label == "http 401" and len(stub.requests) <= 12


BUILD = """
import asyncio, sys
from mia_serve.llm import ChatClient, ReplyCache
from mia_serve.mindscape.records import Window
from mia_serve.mindscape.written import write_summaries

async def main():
    some = [Window((f"Anna walks to town {i}.",), "The Tide", "b", i + 1, 60) for i in range(60)]
    async with ChatClient(sys.argv[1], "m", cache=ReplyCache(sys.argv[2]), concurrency=6) as client:
        print(*(await write_summaries(client, some)).summaries, sep="\\n")

asyncio.run(main())
"""


def test_a_build_killed_in_the_middle_asks_nothing_twice(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    root = Path(__file__).parents[2]
    with serving(echo, delay=0.05) as stub:
        command = [sys.executable, "-c", BUILD, stub.url, str(file)]
        child = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        until(lambda: file.exists() and len(file.read_text().splitlines()) >= 15)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        time.sleep(0.2)
        kept = {json.loads(line)["text"] for line in file.read_text().splitlines()}
        assert 15 <= len(kept) < 60
        stub.requests.clear()
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"Anna reached Part {i}." for i in range(1, 61)]
    assert done.stderr == "", "no bar where stderr is no terminal"
    asked = [echo(body) for body in stub.requests]
    assert len(asked) == 60 - len(kept) and not kept & set(asked)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


LOOP = (
    "Anna walks to the station before dawn and waits there in the cold wind for the late train that will carry her "
    "brother home. "
)


@pytest.mark.parametrize(
    ("reply", "kept", "calls"),
    [
        # It says one thing over and over and never ends.
        (
            LOOP + "He does not come, and she sells the house. " * 30,
            LOOP + "He does not come, and she sells the house.",
            1,
        ),
        (LOOP + "He comes. Then she", LOOP.strip() + " He comes.", 1),
        (
            "安娜在天亮以前走到车站，等待那列会把她弟弟带回家的火车。于是她卖掉了",
            "安娜在天亮以前走到车站，等待那列会把她弟弟带回家的火车。",
            1,
        ),
        ("Anna walks. She", None, 2),  # too little of it
        ("<think>" + LOOP * 20, None, 2),  # it has not begun
        ('{"summary": "' + LOOP * 2, None, 2),
        (LOOP.rstrip(" .") + ", and then", None, 2),  # no sentence of it has an end
    ],
)
def test_a_summary_that_was_cut_off_is_kept_up_to_its_last_whole_sentence(reply: str, kept: str | None, calls: int):
    with serving(lambda body: (reply, "length")) as stub:
        written, client = write(stub.url, windows(1), stand_ins)
    assert written.summaries == [kept or "stand-in 1"]
    assert written.failures == ({} if kept else {("b", 1): "truncated"})
    assert len(stub.requests) == calls and client.stats.cut == (kept is not None)
    assert ("cut off" in client.stats.to_text()) == (kept is not None)
