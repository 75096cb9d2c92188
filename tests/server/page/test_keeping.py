"""What the chat page keeps and takes in: conversations, their branches, files of JSON and of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import PHONE, ChatPage, Chromium, needs_chromium
from tests.server.fake_server import Reply, State, answer
from tests.server.served_page import opened

pytestmark = needs_chromium


def _say(server: State, page: ChatPage, question: str, said: str) -> None:
    server.replies.append(Reply(answer(said)))
    page.ask(question)
    page.wait_for_text(said)
    page.wait_until_done()


def _retry(server: State, page: ChatPage, said: str) -> None:
    server.replies.append(Reply(answer(said)))
    page.tab.get_by_role("button", name="Retry").click()
    page.wait_for_text(said)
    page.wait_until_done()


def _kept(page: ChatPage) -> list[str]:
    """The titles in the history, which is left open."""
    page.tab.get_by_role("button", name="History").click()
    page.tab.locator("#conversations li, #no-conversations:visible").first.wait_for()
    return list(page.tab.locator("#conversations .open span").all_inner_texts())


def _history_file(page: ChatPage, content: bytes, name: str = "in.json") -> str:
    """Import this; gives what the page says of it."""
    told = page.tab.locator("#history-notice")
    told.evaluate("(node) => { node.textContent = ''; }")
    page.tab.locator("#import-file").set_input_files({"name": name, "mimeType": "", "buffer": content})
    page.tab.locator("#history-notice:not(:empty)").wait_for()
    return str(told.inner_text())


def _export(page: ChatPage) -> Any:
    with page.tab.expect_download() as download:
        page.tab.get_by_role("button", name="Export all").click()
    return json.loads(Path(download.value.path()).read_text())


def test_branches_stay_reachable(server: State, page: ChatPage) -> None:
    _say(server, page, "a", "One.")
    _say(server, page, "b", "Two.")
    server.replies.append(Reply(answer("Other one.")))
    page.tab.get_by_role("button", name="Retry").first.click()  # of a turn that is not the last
    page.wait_for_text("Other one.")
    page.wait_until_done()
    assert page.answers() == ["Other one."]
    assert page.tab.get_by_role("group", name="Branches").get_by_text("2/2").is_visible()
    page.tab.get_by_role("button", name="Edit").click()
    _say(server, page, "A", "Third one.")
    before = page.tab.get_by_role("button", name="Branch before")
    before.click()
    assert page.answers() == ["Other one."]
    before.focus()
    page.tab.keyboard.press("Enter")
    assert page.answers() == ["One.", "Two."]
    assert before.is_disabled()
    _say(server, page, "c", "Three.")
    assert [m["content"] for m in server.chats()[-1]["messages"]] == ["a", "One.", "b", "Two.", "c"]
    assert [m["content"] for m in server.chats()[-2]["messages"]] == ["A"]


def test_conversations_are_kept(server: State, page: ChatPage) -> None:
    _say(server, page, "first  question", "One.")
    _retry(server, page, "Again.")
    page.tab.get_by_role("button", name="New chat").click()
    _say(server, page, "second", "Two.")
    page.open(server.url)
    assert page.answers() == []
    assert _kept(page) == ["second", "first question"]
    page.tab.get_by_role("button", name="first question", exact=False).first.click()
    page.wait_for_text("Again.")
    page.tab.get_by_role("button", name="Branch before").click()
    assert page.answers() == ["One."]
    _say(server, page, "more", "More.")
    assert [m["content"] for m in server.chats()[-1]["messages"]] == ["first  question", "One.", "more"]
    page.tab.on("dialog", lambda dialog: dialog.accept())
    assert _kept(page) == ["first question", "second"]
    page.tab.get_by_role("button", name="Delete first question").click()
    page.tab.locator("#conversations li").nth(1).wait_for(state="detached")
    page.open(server.url)
    assert _kept(page) == ["second"]


def _rename(page: ChatPage, title: str, given: str, key: str) -> None:
    """By the keyboard."""
    page.tab.get_by_role("button", name=f"Rename {title}").press("Enter")
    page.tab.get_by_label(f"Title of {title}").fill(given)
    page.tab.keyboard.press(key)
    page.tab.locator("#conversations input").wait_for(state="detached")


@pytest.mark.parametrize("look", [{}, {"size": PHONE, "colors": "dark"}], ids=["desktop", "phone"])
def test_a_conversation_is_renamed(server: State, browser: Chromium, look: dict[str, Any]) -> None:
    with opened(browser, server, **look) as page:
        _say(server, page, "first", "One.")
        page.tab.get_by_role("button", name="New chat").click()
        _say(server, page, "second", "Two.")
        assert _kept(page) == ["second", "first"]
        _rename(page, "first", "  An older   one ", "Enter")
        assert page.tab.locator(":focus").get_attribute("aria-label") == "Rename An older one"
        titles = page.tab.locator("#conversations .open span")
        assert titles.all_inner_texts() == ["second", "An older one"]
        _rename(page, "second", "never", "Escape")  # the list stays open
        _rename(page, "second", " ", "Enter")  # no title at all
        page.tab.get_by_role("button", name="Rename second").click()
        page.tab.get_by_label("Title of second").fill("left")
        page.tab.get_by_role("searchbox").focus()
        page.tab.locator("#conversations input").wait_for(state="detached")
        assert titles.all_inner_texts() == ["second", "An older one"]
        _rename(page, "second", "The one on the page", "Enter")
        for part in ("#conversations .rename", "#conversations .delete", "#conversations .open", "#search"):
            assert 0 <= page.box(part).left < page.box(part).right <= page.box("#history").right
        assert page.box("#conversations .rename").apart(page.box("#conversations .delete"))
        page.tab.get_by_role("button", name="Close").click()
        _say(server, page, "more", "More.")
        page.open(server.url)
        assert _kept(page) == ["The one on the page", "An older one"]
        turns = {c["title"]: len(c["turns"]) for c in _export(page)["conversations"]}
        assert turns == {"The one on the page": 2, "An older one": 1}


def test_a_renamed_conversation_that_another_tab_goes_on_with(server: State, page: ChatPage) -> None:
    _say(server, page, "start", "One.")
    other = ChatPage(page.tab.context.new_page())
    other.open(server.url)
    _kept(other)
    _rename(other, "start", "Another name", "Enter")
    page.tab.bring_to_front()
    _say(server, page, "here", "Two.")
    assert sorted(_kept(page)) == ["Another name", "start"]


def test_the_history_is_searched(server: State, page: ChatPage) -> None:
    _say(server, page, "About cats", "They purr.")
    _retry(server, page, "They MEOW.")
    page.tab.get_by_role("button", name="New chat").click()
    _say(server, page, "About dogs", "They bark, not purr.")
    assert _kept(page) == ["About dogs", "About cats"]
    search, none = page.tab.get_by_role("searchbox", name="Search conversations"), page.tab.locator("#no-conversations")
    for words, found in (
        ("CATS", ["About cats"]),
        ("they purr", ["About dogs", "About cats"]),  # one on a branch that is not shown
        ("meow about", ["About cats"]),
        ("bark meow", []),
        ("", ["About dogs", "About cats"]),
    ):
        search.fill(words)
        expect = "(wanted) => [...document.querySelectorAll('#conversations .open span')].map((e) => e.textContent)"
        page.tab.wait_for_function(f"{expect}.join() === wanted", arg=",".join(found))  # comes a little later
        assert none.is_visible() == (not found)
    search.fill("bark meow")
    none.get_by_text("Nothing found.").wait_for()
    page.tab.get_by_role("button", name="Close").click()
    assert _kept(page) == ["About dogs", "About cats"]


def _say_in_two_tabs(server: State, page: ChatPage) -> None:
    """One conversation, started here and gone on with in another tab; this tab does not know of that yet."""
    _say(server, page, "start", "One.")
    other = ChatPage(page.tab.context.new_page())
    other.open(server.url)
    _kept(other)
    other.tab.locator("#conversations .open").click()
    other.wait_for_text("One.")
    _say(server, other, "there", "Two.")
    page.tab.bring_to_front()


def test_two_tabs_lose_nothing(server: State, page: ChatPage) -> None:
    _say_in_two_tabs(server, page)
    _say(server, page, "here", "Three.")
    asked = [[t["question"] for t in c["turns"]] for c in (_kept(page), _export(page))[1]["conversations"]]
    assert sorted(asked) == [["start", "here"], ["start", "there"]]


_SLOW = """() => {
  const get = IDBObjectStore.prototype.get;
  IDBObjectStore.prototype.get = function (key) {
    for (let i = 0; i < 2000; i++) this.count();  // requests of a transaction wait for those before them
    return get.call(this, key);
  };
}"""


def test_an_answer_that_overtakes_the_store(server: State, page: ChatPage) -> None:
    """Both conversations exist once, though the second save of each begins before the first has ended."""
    _say_in_two_tabs(server, page)
    page.tab.evaluate(_SLOW)
    _say(server, page, "here", "Three.")
    page.open(server.url)
    assert sorted(_kept(page)) == ["start", "start"]
    assert sorted(c["turns"][-1]["text"] for c in _export(page)["conversations"]) == ["Three.", "Two."]


def test_export_and_import(server: State, page: ChatPage, browser: Chromium) -> None:
    _say(server, page, "question", "An answer.")
    _kept(page)
    data = _export(page)
    whole = json.dumps(data).encode()
    assert _history_file(page, whole) == "0 imported."  # it is there
    with opened(browser, server) as fresh:
        assert _kept(fresh) == []
        assert _history_file(fresh, whole) == "1 imported."
        assert _export(fresh) == data
        fresh.tab.locator("#conversations .open").click()
        fresh.wait_for_text("An answer.")


def test_bad_files_are_refused(server: State, page: ChatPage) -> None:
    _say(server, page, "question", "An answer.")
    _kept(page)
    good = _export(page)

    def told(**changes: Any) -> str:
        data = json.loads(json.dumps(good))
        data["conversations"][0]["turns"][0] |= changes
        data["conversations"].insert(0, {**good["conversations"][0], "id": "new"})
        return _history_file(page, json.dumps(data).encode())

    assert "is not JSON" in _history_file(page, b"{")
    assert "is not JSON" in _history_file(page, b"\xff\x00", "x.png")
    assert "is not an export of this page" in _history_file(page, b"[]")
    assert "version 2" in _history_file(page, json.dumps({**good, "version": 2}).encode())
    assert told(text=5) == "conversations[1].turns[0].text is 5: it must be a text"
    assert told(files=[{"name": "x"}]) == "conversations[1].turns[0].files[0].text is missing: it must be a text"
    assert "names no turn before it" in told(parent=good["conversations"][0]["leaf"])  # a circle
    assert told(extra=1) == "conversations[1].turns[0].extra is not known"
    assert _export(page) == good  # nothing of them was taken


_FULL = """() => {
  const put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (value) {
    if (window.full) throw new DOMException("no room", "QuotaExceededError");
    return put.call(this, value);
  };
}"""


def test_a_full_store_is_told_and_loses_nothing(server: State, page: ChatPage) -> None:
    _say(server, page, "small", "One.")
    page.tab.evaluate(_FULL)
    page.tab.evaluate("window.full = true")
    page.tab.get_by_role("button", name="New chat").click()
    _say(server, page, "large", "Two.")
    page.tab.get_by_role("alert").get_by_text("its store is full").wait_for()
    page.tab.get_by_role("button", name="Dismiss").click()
    page.tab.get_by_role("button", name="New chat").click()
    assert _kept(page) == ["large", "small"]
    assert len(_export(page)["conversations"]) == 2
    page.tab.evaluate("window.full = false")
    page.tab.on("dialog", lambda dialog: dialog.accept())
    page.tab.get_by_role("button", name="Delete small").click()
    page.tab.locator("#conversations li").nth(1).wait_for(state="detached")
    page.open(server.url)
    assert _kept(page) == ["large"]


def test_text_files_are_attached(server: State, page: ChatPage) -> None:
    pick = page.tab.locator("#pick")
    pick.set_input_files({"name": "a.png", "mimeType": "", "buffer": b"\x89PNG\x00"})
    page.tab.get_by_role("alert").get_by_text("a.png is not text in UTF-8").wait_for()
    pick.set_input_files({"name": "big.txt", "mimeType": "", "buffer": b"x" * (1 << 20)})
    page.tab.get_by_role("alert").get_by_text("one message takes 524,288").wait_for()
    pick.set_input_files([
        {"name": "a.md", "mimeType": "", "buffer": "```\nnaïve\n```\n".encode()},
        {"name": "b.txt", "mimeType": "", "buffer": b"two"},
    ])  # fmt: skip
    page.tab.get_by_role("button", name="Remove b.txt").click()
    _say(server, page, "What is it?", "A file.")
    expected = "File a.md:\n````\n```\nnaïve\n```\n````\n\nWhat is it?"
    assert server.chats()[0]["messages"] == [{"role": "user", "content": expected}]
    assert page.tab.locator(".asked summary").inner_text() == "a.md · 14 characters"
    page.tab.get_by_role("button", name="Edit").click()
    assert page.tab.get_by_role("button", name="Remove a.md").is_visible()


def test_a_text_file_is_dropped_onto_the_page(server: State, page: ChatPage) -> None:
    def drop(name: str, data: list[int]) -> None:
        """As a person does who drags it over the page and lets go."""
        made = """([name, data]) => {
          const carried = new DataTransfer();
          carried.items.add(new File([new Uint8Array(data)], name));
          return carried;
        }"""
        carried = page.tab.evaluate_handle(made, [name, data])
        over = """(carried) => document.querySelector("main").dispatchEvent(
          new DragEvent("dragover", { dataTransfer: carried, bubbles: true, cancelable: true }))"""
        assert page.tab.evaluate(over, carried) is False  # the page takes it; else the browser would open it
        page.tab.dispatch_event("main", "drop", {"dataTransfer": carried})

    drop("notes.txt", list("naïve".encode()))
    page.tab.get_by_role("button", name="Remove notes.txt").wait_for()
    drop("a.png", [0x89, 0x50, 0])
    page.tab.get_by_role("alert").get_by_text("a.png is not text in UTF-8").wait_for()
    _say(server, page, "What is it?", "A file.")
    assert server.chats()[0]["messages"] == [
        {"role": "user", "content": "File notes.txt:\n```\nnaïve\n```\n\nWhat is it?"}
    ]


def test_code_is_colored_and_formulas_are_set(server: State, page: ChatPage) -> None:
    said = (
        "It is $\\frac{1}{2}$, \\(x^2\\), $5 or $6.\n\n"
        "$$\\sum_{i=1}^n i$$\n\n```python\ndef f(): return '<b>'\n```\n$\\bad$"
    )
    _say(server, page, "x", said[:5])
    server.replies.append(Reply(answer(said)))
    page.tab.get_by_role("button", name="Retry").click()
    page.tab.locator(".katex").nth(2).wait_for()
    page.wait_until_done()
    page.tab.locator(".hljs-keyword").first.wait_for()
    assert page.tab.locator(".katex").count() == 3
    assert page.tab.locator(".katex-display").count() == 1
    assert page.tab.locator(".katex annotation").all_text_contents() == [
        "\\frac{1}{2}", "x^2", "\\sum_{i=1}^n i"
    ]  # fmt: skip
    assert "$5 or $6." in page.tab.locator(".prose p").first.inner_text()
    assert page.tab.locator(".prose p").last.inner_text() == "$\\bad$"
    assert page.tab.locator(".code code").inner_text() == "def f(): return '<b>'"
    assert page.tab.locator(".code code b").count() == 0
    assert page.tab.evaluate("document.fonts.check('16px KaTeX_Main')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_chosen(server: State, page: ChatPage, theme: str) -> None:
    page.tab.get_by_role("button", name="Settings").click()
    page.tab.locator("#settings").get_by_label("Theme").select_option(theme)
    page.tab.get_by_role("button", name="Save").click()
    page.open(server.url)
    light = page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(248, 247, 244)"
    assert light == (theme == "light")


def test_sampling_reaches_the_server(server: State, page: ChatPage) -> None:
    page.settings(Top_k="40", Min_p="0.05", Presence_penalty="0.5", Frequency_penalty="-1", Repetition_penalty="1.1")
    _say(server, page, "x", "Ok.")
    expected = {"top_k": 40, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1}
    assert {name: server.chats()[0].get(name) for name in expected} == expected
