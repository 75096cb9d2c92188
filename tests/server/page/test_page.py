"""The chat page in a real browser: streaming, stopping, errors, the key, hostile text, layout. A scripted server."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.browser import DESKTOP, PHONE, Box, ChatPage, Chromium, needs_chromium
from tests.server.fake_server import CARD, Reply, State, answer, call, chunk, error, serving, usage
from tests.server.served_page import opened, serve_page
from tests.waiting import PATIENCE, until

pytestmark = needs_chromium
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"""


# --- Answers


def test_tokens_are_shown_as_they_come(server: State, page: ChatPage) -> None:
    gate = threading.Event()
    begin = [chunk(role="assistant"), chunk(content="The "), chunk(content="answer")]
    end = [chunk(content=" is 42."), chunk("stop"), usage(1234, 5, 1024), b"[DONE]"]
    server.replies.append(Reply([*begin, gate, *end]))
    asked = time.perf_counter()
    page.ask("What is it?")
    page.wait_for_text("The answer")
    shown = time.perf_counter()
    assert page.answers() == ["The answer"]
    assert page.tab.get_by_role("button", name="Stop").is_visible()
    assert "tokens/s" not in page.figures() or "≈" in page.figures()
    held = time.perf_counter() - shown
    gate.set()
    page.wait_until_done()
    whole = time.perf_counter() - asked
    assert page.answers() == ["The answer is 42."]
    rate = re.match(
        r"([\d.]+) tokens/s · first token \d+ ms · 1,234 in \(1,024 cached\) · 5 out$", page.figures().strip()
    )
    assert rate is not None
    assert 0.9 * held <= (5 - 1) / float(rate[1]) <= 1.1 * whole
    (body,) = server.chats()
    assert body == {
        "model": CARD["id"], "messages": [{"role": "user", "content": "What is it?"}], "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_the_script_is_the_protocol() -> None:
    """What the fake server sends is what the OpenAI client expects."""
    from openai.types.chat import ChatCompletionChunk

    steps = [*answer("yes", reasoning="hm"), call(0, '{"a"', "f"), call(0, ": 1}")]
    for step in steps:
        if isinstance(step, dict):
            ChatCompletionChunk.model_validate(step, strict=True)


def _endless() -> Iterator[dict[str, Any]]:
    for i in itertools.count():
        time.sleep(0.005)
        yield chunk(content=f"{i} ")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_closes_the_connection(server: State, page: ChatPage, how: str) -> None:
    server.replies += [Reply(_endless()), Reply(answer("Again."))]
    page.ask("Count.")
    page.wait_for_text("0 1 2 3")
    page.stop() if how == "button" else page.tab.keyboard.press("Escape")
    assert server.left.wait(PATIENCE)
    page.wait_until_done()
    assert "stopped" in page.figures()
    (said,) = page.answers()
    page.ask("And now?")
    page.wait_for_text("Again.")
    before, now = server.chats()[1]["messages"][1:]
    assert before["content"].strip() == said
    assert now == {"role": "user", "content": "And now?"}


def test_a_conversation_goes_on_is_edited_and_begins_anew(server: State, page: ChatPage) -> None:
    server.replies += [Reply(answer(text)) for text in ("One.", "Two.", "Three.", "Four.", "Five.")]
    for question, said in [("a", "One."), ("b", "Two.")]:
        page.ask(question)
        page.wait_for_text(said)
        page.wait_until_done()
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "One."}]
    assert server.chats()[1]["messages"] == [*first, {"role": "user", "content": "b"}]
    page.tab.get_by_role("button", name="Retry").last.click()
    page.wait_for_text("Three.")
    page.wait_until_done()
    assert server.chats()[2]["messages"] == server.chats()[1]["messages"]
    page.tab.get_by_role("button", name="Edit").first.click()
    page.ask("A")
    page.wait_for_text("Four.")
    page.wait_until_done()
    assert server.chats()[3]["messages"] == [{"role": "user", "content": "A"}]
    assert page.answers() == ["Four."]
    page.tab.get_by_role("button", name="New chat").click()
    assert page.answers() == []
    page.ask("c")
    page.wait_for_text("Five.")
    assert server.chats()[4]["messages"] == [{"role": "user", "content": "c"}]


def test_the_view_follows_until_it_is_scrolled(server: State, page: ChatPage) -> None:
    lines = [chunk(content=f"{i}\n\n") for i in range(100)]
    gate = threading.Event()
    server.replies += [Reply([*lines, gate, *lines, chunk("stop"), usage(1, 1), b"[DONE]"])]
    page.ask("Count.")
    page.wait_for_text("99")
    main = page.tab.locator("main")
    below = "(node) => node.scrollHeight - node.scrollTop - node.clientHeight"
    assert main.evaluate(below) < 2
    main.hover()
    page.tab.mouse.wheel(0, -700)
    until(lambda: main.evaluate(below) >= 600)
    place = main.evaluate("(node) => node.scrollTop")
    gate.set()
    page.wait_until_done()
    assert main.evaluate("(node) => node.scrollTop") == place
    assert main.evaluate(below) > 3000


def test_thinking_is_shown_and_folded(server: State, page: ChatPage) -> None:
    gate, later = threading.Event(), threading.Event()
    server.replies.append(
        Reply([chunk(reasoning_content="Let me", reasoning="Let me"), chunk(reasoning_content=" see."), gate,
               chunk(content="Yes"), later, chunk("stop"), usage(1, 3), b"[DONE]"])
    )  # fmt: skip
    page.ask("Well?")
    thoughts = page.tab.locator(".thinking div")
    thoughts.get_by_text("Let me see.").wait_for()
    gate.set()
    page.tab.get_by_text("Thought for").wait_for()
    assert not thoughts.is_visible()
    later.set()
    page.wait_until_done()
    assert page.answers() == ["Yes"]
    page.tab.get_by_text("Thought for").click()
    assert thoughts.inner_text() == "Let me see."


def test_tool_calls_are_shown_and_passed_on(server: State, page: ChatPage) -> None:
    parts = [call(0, '{"city":', "weather"), call(0, ' "Paris"}'), call(1, "{}", "clock"), chunk("tool_calls")]
    server.replies += [Reply([*parts, usage(9, 9), b"[DONE]"]), Reply(answer("Done."))]
    page.ask("Weather?")
    page.wait_until_done()
    assert page.tab.locator(".code").all_inner_texts() == [
        'Tool call: weather\nCopy\n{\n  "city": "Paris"\n}', "Tool call: clock\nCopy\n{}"
    ]  # fmt: skip
    page.ask("So?")
    page.wait_for_text("Done.")
    calls = server.chats()[1]["messages"][1]["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("weather", {"city": "Paris"}), ("clock", {})
    ]  # fmt: skip


def test_events_may_be_cut_anywhere(server: State, page: ChatPage) -> None:
    """Comments, other line ends, several events in one packet, a character in two."""
    said = chunk(content="naïve 🙂 ok")
    data = b": ping\r\n\r\ndata: " + json.dumps(said, ensure_ascii=False).encode() + b"\r\n\r\n"
    cut = data.index("🙂".encode()) + 2
    rest = [chunk("stop"), usage(1, 2)]
    tail = b"".join(b"data:" + json.dumps(step).encode() + b"\n\n" for step in rest) + b"data: [DONE]\n\n"
    gate = threading.Event()
    server.replies.append(Reply([data[:cut], gate, data[cut:], tail]))
    page.ask("x")
    threading.Timer(0.1, gate.set).start()
    page.wait_for_text("naïve 🙂 ok")
    page.wait_until_done()
    assert page.answers() == ["naïve 🙂 ok"]


# --- Markdown

MARKDOWN = """# Title

Some **bold**, *slanted*, `a <b> & c` and [a link](https://example.org/a_(b)), https://example.org/x. 2 * 3 * 4.

- one
- two with **bold**
  1. inner

     ```python
     print("- no item")
     ```
  2. more

3) third

> quoted

| a | b |
|---|---|
| 1 | **2** |

---

```html
<b>not bold</b>

# no title
```
**open"""


def _outline(page: ChatPage) -> Any:
    """The answer's elements as nested lists: [tag, child or text ...]."""
    script = """(node) => {
      const walk = (n) => n.nodeType === 3 || n.matches("code, .formula") ? leaf(n)
        : [n.tagName.toLowerCase(), ...inside(n)];
      const leaf = (n) => n.nodeType === 3 ? n.data : [n.tagName.toLowerCase(), n.textContent];
      const inside = (n) => [...n.childNodes].map(walk).filter((x) => x !== "");
      return inside(node);
    }"""
    return page.tab.locator(".prose").last.evaluate(script)


def test_markdown(server: State, page: ChatPage) -> None:
    server.replies.append(Reply([chunk(content=MARKDOWN), chunk("stop"), usage(1, 1), b"[DONE]"]))
    page.ask("x")
    page.wait_until_done()
    code = [["span", "python"], ["button", "Copy"]]
    assert _outline(page) == [
        ["h3", "Title"],
        ["p", "Some ", ["strong", "bold"], ", ", ["em", "slanted"], ", ", ["code", "a <b> & c"], " and ",
         ["a", "a link"], ", ", ["a", "https://example.org/x"], ". 2 * 3 * 4."],
        ["ul", ["li", ["p", "one"]],
         ["li", ["p", "two with ", ["strong", "bold"]],
          ["ol", ["li", ["p", "inner"], ["div", ["div", *code], ["pre", ["code", 'print("- no item")']]]],
           ["li", ["p", "more"]]]]],
        ["ol", ["li", ["p", "third"]]],
        ["blockquote", ["p", "quoted"]],
        ["div", ["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                         ["tbody", ["tr", ["td", "1"], ["td", ["strong", "2"]]]]]]],
        ["hr"],
        ["div", ["div", ["span", "html"], ["button", "Copy"]], ["pre", ["code", "<b>not bold</b>\n\n# no title"]]],
        ["p", "**open"],
    ]  # fmt: skip
    targets = page.tab.locator(".prose a").evaluate_all("(links) => links.map((a) => [a.href, a.rel, a.target])")
    assert targets == [
        ["https://example.org/a_(b)", "noopener noreferrer", "_blank"],
        ["https://example.org/x", "noopener noreferrer", "_blank"],
    ]
    assert page.tab.locator(".prose ol").last.get_attribute("start") == "3"


def test_markdown_in_pieces_ends_the_same(server: State, page: ChatPage) -> None:
    """Drawn again and again while it comes, the answer ends as if it had come at once."""
    end = [chunk("stop"), usage(1, 1), b"[DONE]"]

    def slowly() -> Iterator[Any]:
        for i in range(0, len(MARKDOWN), 3):
            time.sleep(0.002)
            yield chunk(content=MARKDOWN[i : i + 3])
        yield from end

    server.replies += [Reply([chunk(content=MARKDOWN), *end]), Reply(slowly())]
    outlines = []
    for _ in range(2):
        page.ask("x")
        page.wait_until_done()
        outlines.append(_outline(page))
    assert outlines[0] == outlines[1]


def test_no_text_takes_long(server: State, page: ChatPage) -> None:
    """A model in a loop must not freeze the tab: no text takes as long as dozens of plain ones of its length."""

    def seconds(text: str) -> float:
        server.replies.append(Reply([chunk(content=text), chunk("stop"), usage(1, 1), b"[DONE]"]))
        began = time.perf_counter()
        page.ask("x")
        page.wait_until_done()
        lasted = time.perf_counter() - began
        page.tab.get_by_role("button", name="New chat").click()
        return lasted

    plain = max(seconds("a " * 10_000) for _ in range(3))
    for unit in ("[", "**", "*a", "`", "- ", "> ", "#", "|", "~~~", "https://", "1. a\n\n", "[a](http://(", "\n|-"):
        assert seconds(unit * (20_000 // len(unit))) < 30 * plain, unit


def test_hostile_text_stays_text(browser: Chromium) -> None:
    """Whatever a server's strings hold, the page shows it. Served without a policy, which would hide a mistake."""
    fence = f"```{HOSTILE}\n{HOSTILE}\n```"
    links = '[a](javascript:window.hacked=1) ![b](https://example.org/i.png) [c](data:text/html,x) [d](https://x.y"onclick=z)'
    said = f"{HOSTILE}\n\n# {HOSTILE}\n\n- {HOSTILE}\n\n| {HOSTILE} |\n|---|\n| {HOSTILE} |\n\n{fence}\n\n{links}"
    with serving() as server, browser.page() as page:
        serve_page(server, strict=False)
        server.ready, server.cause = False, HOSTILE
        server.models = [CARD | {"id": HOSTILE, "root": HOSTILE}, CARD | {"id": f"2{HOSTILE}"}]
        server.replies += [
            Reply([chunk(reasoning_content=HOSTILE), chunk(content=said), call(0, HOSTILE, HOSTILE), chunk("stop"),
                   usage(1, 1), b"[DONE]"]),
            error(HOSTILE, 400),
        ]  # fmt: skip
        page.tab.goto(server.url)
        page.tab.locator("#cause").get_by_text(f"Not ready: {HOSTILE}").wait_for()
        server.ready = True
        page.tab.get_by_role("heading", name=f"Ask {HOSTILE}").wait_for()
        for _ in range(2):
            page.ask(HOSTILE)
            page.wait_until_done()
        page.tab.get_by_role("button", name="Settings").click()
        assert page.tab.get_by_role("alert").inner_text().startswith(HOSTILE)
        assert page.tab.locator(".asked p").all_inner_texts() == [HOSTILE, HOSTILE]
        assert page.tab.evaluate("window.hacked") is None
        assert page.tab.locator("img, iframe, body script:not([type=module])").count() == 0
        targets = page.tab.locator(".prose a").evaluate_all("(links) => links.map((a) => new URL(a.href).protocol)")
        assert targets
        assert set(targets) == {"https:"}
        assert all(address.startswith((server.url, "data:")) for address in page.addresses)


# --- The server's state


def test_errors_are_shown_and_retried(server: State, wary_page: ChatPage) -> None:
    page = wary_page
    broken = [chunk(content="Par"), {"error": {"message": "the engine died", "type": "server_error"}}]
    server.replies += [
        error("temperature is 3: give a number from 0 to 2", 400), Reply((), 502, b"<html>Bad gateway</html>"),
        Reply(broken), Reply([chunk(content="Part")]), Reply(answer("Fine.")),
    ]  # fmt: skip
    alert = page.tab.get_by_role("alert")
    page.ask("Hello")
    for expected in ("temperature is 3: give a number from 0 to 2", "502", "the engine died", "ended before"):
        alert.get_by_text(expected).wait_for()
        alert.get_by_role("button", name="Retry").click()
    page.wait_for_text("Fine.")
    page.wait_until_done()
    assert alert.count() == 0
    assert page.answers() == ["Fine."]
    assert [body["messages"] for body in server.chats()] == [[{"role": "user", "content": "Hello"}]] * 5


def test_a_failed_turn_is_not_told_to_the_model(server: State, wary_page: ChatPage) -> None:
    server.replies += [error("the server is full", 429), Reply(answer("Fine."))]
    wary_page.ask("one")
    wary_page.wait_for_text("the server is full")
    wary_page.ask("two")
    wary_page.wait_for_text("Fine.")
    assert server.chats()[1]["messages"] == [{"role": "user", "content": "two"}]


def test_the_key_is_asked_for(browser: Chromium, server: State) -> None:
    server.key = "s3cret"
    server.replies.append(Reply(answer("Welcome.")))
    with browser.page() as page:
        page.tab.goto(server.url)
        dialog = page.tab.get_by_role("dialog")
        dialog.get_by_text("asks for an API key").wait_for()
        assert not dialog.get_by_role("alert").is_visible()
        for key in ("wrong", "s3cret"):
            dialog.get_by_label("API key").fill(key)
            page.tab.keyboard.press("Enter")
            if key == "wrong":
                dialog.get_by_role("alert").wait_for()
        page.tab.get_by_role("heading", name="Ask tiny-llama").wait_for()
        page.tab.get_by_text("graphllm 1.2.3").first.wait_for()
        page.ask("Hello")
        page.wait_for_text("Welcome.")
        stores = page.tab.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert ["s3cret" in store for store in stores] == [True, False, False]
        assert all(p.startswith("Failed to load resource") for p in page.problems)
        assert not any("s3cret" in address for address in page.addresses)
        page.tab.get_by_role("button", name="Settings").click()
        page.tab.locator("#settings").get_by_label("API key").fill("")
        page.tab.get_by_role("button", name="Save").click()
        page.tab.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        page.ask("Again")
        page.tab.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        page.wait_for_text("this server needs an API key")


def test_health_is_watched(browser: Chromium, server: State) -> None:
    server.ready, server.cause = False, "loading the weights"
    with browser.page() as page:
        page.tab.goto(server.url)
        page.tab.get_by_role("status").get_by_text("Not ready: loading the weights").wait_for()
        server.ready = True
        page.tab.get_by_role("heading", name="Ask tiny-llama").wait_for()
        assert not page.tab.locator("#cause").is_visible()
        facts = page.tab.locator("#welcome dl").inner_text().split("\n")
        assert {"tiny-llama", "4,096 tokens", "/models/tiny-llama", "graphllm", "graphllm 1.2.3"} <= set(facts)


def test_a_server_that_went_away(browser: Chromium) -> None:
    with browser.page() as page:
        with serving() as server:
            serve_page(server)
            page.open(server.url)
        page.ask("Anyone?")
        page.tab.get_by_role("alert").get_by_text("does not answer").wait_for()


@pytest.mark.parametrize("slash", ["", "/"])
def test_below_a_prefix(browser: Chromium, slash: str) -> None:
    with serving("/some/where") as server:
        serve_page(server)
        server.replies.append(Reply(answer("Here.")))
        with browser.page() as page:
            page.open(server.url + slash)
            page.ask("Where?")
            page.wait_for_text("Here.")
            assert page.problems == []
        asked = {r.path.removeprefix("/some/where") for r in server.requests}
        assert {path for path in asked if not path.startswith("/page/")} == {
            slash, "/v1/models", "/version", "/health/ready", "/v1/chat/completions"
        }  # fmt: skip


# --- Settings and keys


def test_settings_reach_the_server(server: State, page: ChatPage) -> None:
    server.replies += [Reply(answer("Ok.")), Reply(answer("Ok again."))]
    page.settings(System_prompt="Be brief.", Temperature="0", Top_p="0.9", Max_tokens="64", Seed="7")
    page.ask("Hello")
    page.wait_for_text("Ok.")
    body = server.chats()[0]
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0, "top_p": 0.9, "max_tokens": 64, "seed": 7
    }  # fmt: skip
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.open(server.url)
    page.settings(Seed="", Top_p="1", Max_tokens="")
    page.tab.get_by_role("button", name="Settings").click()
    page.tab.get_by_label("Top p").fill("2")
    page.tab.get_by_role("button", name="Save").click()
    assert page.tab.locator("#settings").is_visible()
    page.tab.keyboard.press("Escape")
    page.ask("Hello")
    page.wait_for_text("Ok again.")
    body = server.chats()[1]
    assert {name: body.get(name) for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0, "top_p": 1, "max_tokens": None, "seed": None
    }  # fmt: skip


def test_another_model_is_chosen(server: State, page: ChatPage) -> None:
    server.models.append(CARD | {"id": "adapter"})
    server.replies.append(Reply(answer("Ok.")))
    page.open(server.url)
    page.tab.get_by_role("button", name="tiny-llama").click()
    page.tab.locator("#settings").get_by_label("Model").select_option("adapter")
    page.tab.get_by_role("button", name="Save").click()
    page.tab.get_by_role("heading", name="Ask adapter").wait_for()
    page.ask("Hello")
    page.wait_for_text("Ok.")
    assert server.chats()[0]["model"] == "adapter"


def test_the_keyboard_is_enough(server: State, page: ChatPage) -> None:
    server.replies.append(Reply(answer("Ok.")))
    field = page.tab.get_by_label("Message", exact=True)
    assert field.evaluate("(node) => node === document.activeElement")
    low = page.box("#prompt")
    page.tab.keyboard.type("one")
    page.tab.keyboard.press("Shift+Enter")
    page.tab.keyboard.type("two")
    assert page.box("#prompt").top < low.top - 10
    page.tab.keyboard.press("Enter")
    page.wait_for_text("Ok.")
    assert server.chats()[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert field.input_value() == ""
    page.tab.keyboard.press("Enter")
    assert len(server.chats()) == 1


def test_copying(browser: Chromium, server: State) -> None:
    server.replies.append(Reply(answer("Some **text**.")))
    with browser.page() as page:
        page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.open(server.url)
        page.ask("x")
        page.wait_until_done()
        page.tab.locator(".answer").get_by_role("button", name="Copy").click()
        page.tab.get_by_role("button", name="Copied").wait_for()
        assert page.tab.evaluate("navigator.clipboard.readText()") == "Some **text**."


def test_every_control_has_a_name(server: State, page: ChatPage) -> None:
    server.replies.append(Reply(answer("```python\ncode\n```", reasoning="Hm.")))
    page.ask("x")
    page.wait_until_done()
    page.tab.get_by_role("button", name="Settings").click()
    nameless = page.tab.evaluate(
        """[...document.querySelectorAll("button, input, textarea, select, summary, pre")].filter((node) =>
          !(node.ariaLabel || node.textContent.trim() || node.labels?.[0]?.textContent.trim())
        ).map((node) => node.outerHTML)"""
    )
    assert nameless == []


# --- Looks

LONG = """Paged attention keeps the **keys and values** of a sequence in pages of a fixed size:

1. no memory is lost to padding,
2. beginnings that prompts share are kept once,
3. a page is found through a table, as in an operating system.

```python
def lookup(table: list[int], position: int, block_size: int = 16) -> tuple[int, int]:
    return table[position // block_size], position % block_size
```

| Batch | ms | tokens/s |
|---|---|---|
| 1 | 4.2 | 238 |
| 64 | 6.5 | 9,846 |

Averyveryverylongwordthatfitsnowhere""" + "x" * 120 + " https://example.org/" + "path/" * 30  # fmt: skip


_COLORS = """[...document.querySelectorAll("p, li, code, button, .figures, summary, h3, th, td, a, span")]
  .filter((node) => node.checkVisibility() && node.textContent.trim() && !node.closest(".sr, :disabled"))
  .map((node) => {
    let under = node;
    while (/rgba\\(.*, 0\\)/.test(getComputedStyle(under).backgroundColor)) under = under.parentElement;
    return [node.textContent.slice(0, 30), getComputedStyle(node).color, getComputedStyle(under).backgroundColor];
  })"""


def _contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2 for two CSS colors."""

    def luminance(color: str) -> float:
        parts = [int(c) / 255 for c in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class Look(NamedTuple):
    """The page as it stood. width: of what there is, shown or not. colors: (text, its color, the one below it)."""

    width: int
    boxes: dict[str, Box]
    colors: list[tuple[str, str, str]]
    picture: Any


def _look(page: ChatPage) -> Look:
    from PIL import Image

    return Look(
        page.tab.evaluate("Math.max(...['html', 'main'].map((name) => document.querySelector(name).scrollWidth))"),
        {name: page.box(name) for name in ("header", "#composer", ".figures", ".prose > :last-child")},
        page.tab.evaluate(_COLORS),
        Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB"),
    )


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_looks(browser: Chromium, server: State, size: tuple[int, int], colors: Any, tmp_path: Path) -> None:
    """Nothing is wider than the window, hidden, on top of another thing, hard to read, or of the wrong colors."""
    server.models = [CARD | {"id": "graphllm-embedded-with-a-long-name"}]
    server.replies += [Reply(answer("Hello! How can I help?")), Reply(answer(LONG, reasoning="Pages, as in a book."))]
    with opened(browser, server, size=size, colors=colors) as page:
        for question in ("H" + "m" * 200, "How does paged attention work?"):
            page.ask(question)
            page.wait_until_done()
        look = _look(page)
    look.picture.save(tmp_path / "page.png")
    assert look.picture.size == size
    assert look.width <= size[0]
    header, composer, figures, text = look.boxes.values()
    for box in (header, composer, figures):
        assert 0 <= box.left < box.right <= size[0]
        assert 0 <= box.top < box.bottom <= size[1]
    assert header.bottom <= text.top < text.bottom <= figures.top
    assert figures.bottom <= composer.top
    assert [c for c in look.colors if _contrast(c[1], c[2]) < 4.5] == []
    grey = look.picture.convert("L")
    (lowest, highest), mean = grey.getextrema(), grey.resize((1, 1)).getpixel((0, 0))
    assert highest - lowest > 150
    assert mean > 200 if colors == "light" else mean < 60
    for box in (text, figures):
        letters = grey.crop([round(side) for side in box])
        assert len(letters.getcolors()) > 16  # with soft edges: neither blank nor a plain block
