"""The status page in a real browser: what it shows, and that nothing of it can be abused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from scripts.browser import Browser, Page
from tests.conftest import ChainModel, TinyModel
from tests.page.conftest import INJECTION, KEY, NAME, SCRIPT, refused, talk
from tests.serving import Server, serving, tried_once

pytestmark = pytest.mark.thorough

PANELS = {
    "headline": "is loaded",
    "saved-hour": "did not have to be read again",
    "saved-day": "in the last day",
    "saved-drafts": "draft",
    "running-summary": "requests are running",
    "running": "Reads its prompt:",
    "memory-summary": "are in use",
    "memory-legend": "weights: the models themselves",
    "conversations": "read again because message 1 (user) says something else",
    "recent": "Show what differs",
    "refused": "GET /nothing",
    "saved-figure": "%",
    "models": "loaded, answers",
    "chat-model": "the one that was used last",
    "downloads": "nobody/nothing",
    "ssd": "The disk tier is on",
}
"""What each part shows once there is traffic."""
LOADED = "document.querySelectorAll('#recent li').length > 0"


def text(page: Page, element: str) -> str:
    return page.run(f"document.getElementById({json.dumps(element)}).innerText")


def check_quiet(page: Page, server: Server) -> None:
    """Nothing went wrong in the page, and it asked nobody but its server."""
    assert page.problems == []
    hosts = {urlsplit(url).netloc for url in page.requested if not url.startswith("data:")}
    assert hosts == {urlsplit(server.url).netloc}


@pytest.mark.sample(2)
@pytest.mark.parametrize("width", [360, 1600])
def test_every_panel_is_filled_and_fits(browser: Browser, busy: Server, width: int):
    with browser.page(busy.url, width) as page:
        page.until(f"{LOADED} && document.querySelector('#downloads li') !== null")
        for element, expected in PANELS.items():
            assert expected in text(page, element), element
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(BEYOND) == []
        assert page.run("document.querySelectorAll('#conversations .turns li').length") >= 5
        check_quiet(page, busy)


BEYOND = """[...document.querySelectorAll('main *')].filter(one => !one.closest('.sr') &&
    one.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(one => one.outerHTML)"""


@pytest.mark.thorough
@pytest.mark.parametrize("dark", [False, True])
def test_texts_controls_and_bars_have_enough_contrast(browser: Browser, busy: Server, dark: bool):
    with browser.page(busy.url, dark=dark) as page:
        page.until(LOADED)
        page.run("document.querySelector('#recent button').click()")
        page.until("document.querySelectorAll('#recent pre').length === 2")
        assert page.run(f"({LOW_CONTRAST})()") == []
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 22, 20)") is dark


LOW_CONTRAST = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = numbers(colour).map(one => one / 255).map(
      one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
  };
  const found = [];
  const check = (element, what, colour, behind, least) => {
    const is = ratio(colour, behind);
    if (is < least) found.push(`${what} ${element.outerHTML.slice(0, 80)} ${is.toFixed(2)}`);
  };
  let texts = 0;
  for (const element of document.querySelectorAll('body *')) {
    const style = getComputedStyle(element), own = [...element.childNodes].some(
      one => one.nodeType === Node.TEXT_NODE && one.textContent.trim());
    if (!element.checkVisibility() || element.disabled || element.matches('style, script')) continue;
    if (own) { texts += 1; check(element, 'text', style.color, ground(element), 4.5); }
    if (element.matches('input, textarea, select, button'))
      check(element, 'border', style.borderTopColor, ground(element.parentElement), 3);
    if (element.matches('#memory-bar > span:not(.free), .turns span:not(.sr), .swatch:not(.free)'))
      check(element, 'bar', style.backgroundColor, ground(element.parentElement), 3);
  }
  if (texts < 50) found.push(`only ${texts} texts`);
  return found;
}"""


@pytest.mark.thorough
def test_everything_is_reached_and_operated_with_the_keyboard(browser: Browser, busy: Server):
    with browser.page(busy.url) as page:
        page.until(LOADED)
        reached = tab_through(page)
        assert page.run("[...document.querySelectorAll('button, textarea, input, select, a')].filter(one => "
                        "!one.disabled && one.checkVisibility()).length") <= len(reached)  # fmt: skip
        assert {"question", "send", "fresh", "log"} <= {name for name, _ in reached}
        assert [name for name, outline in reached if outline != "solid"] == []
        until_focus(page, "question")
        page.write("Tell me something")
        page.press("Enter")
        page.until("document.querySelectorAll('#log .message').length === 2")
        page.until("document.querySelectorAll('#log .message')[1].textContent.length > 30", 30)
        assert text(page, "chat-state") == "The model answers …"
        assert page.run("document.getElementById('log').getAttribute('aria-busy')") == "true"
        until_focus(page, "stop")
        page.press("Enter")
        page.until("document.getElementById('chat-state').innerText === 'You stopped the reply.'")
        assert page.run("document.activeElement.id") == "question"
        assert page.run("[document.getElementById('send').disabled, document.getElementById('stop').disabled]"
                        ) == [False, True]  # fmt: skip
        page.until("document.getElementById('recent').innerText.includes('its client left before the end')")
        check_quiet(page, busy)


def tab_through(page: Page) -> list[tuple[str, str]]:
    """Press Tab once around; return the ids or texts, and the outline styles, of what had the focus."""
    reached: list[tuple[str, str]] = []
    for _ in range(80):
        page.press("Tab")
        node = page.run("(one => [one.id || one.innerText, getComputedStyle(one).outlineStyle, one.tagName])"
                        "(document.activeElement)")  # fmt: skip
        if node[2] == "BODY":
            break
        reached.append((node[0], node[1]))
    return reached


def until_focus(page: Page, name: str) -> None:
    for _ in range(80):
        if page.run("document.activeElement.id") == name:
            return
        page.press("Tab")
    raise AssertionError(f"Tab never reaches {name}")


def test_every_control_region_and_picture_has_a_name(browser: Browser, busy: Server):
    roles = "button textbox link progressbar region image log main banner contentinfo".split()
    with browser.page(busy.url) as page:
        page.until(LOADED)
        elements = page.names(roles)
        landmarks = {"main", "banner", "contentinfo"}
        assert [role for role, name in elements if not name and role not in landmarks] == []
        assert {role for role, _ in elements} >= {"button", "textbox", "link", "progressbar", "region", "log"}
        assert {role for role, _ in elements} >= landmarks
        names = [name for role, name in elements if role == "button"]
        assert len(names) == len(set(names)), "two buttons with one name"


@pytest.mark.thorough
def test_what_moves_stands_still_for_those_who_ask(browser: Browser, busy: Server):
    moving = "getComputedStyle(document.querySelector('.bar > span')).transitionDuration"
    with browser.page(busy.url) as page:
        page.until(LOADED)
        assert page.run(moving) == "0.4s"
        wanted = {"name": "prefers-reduced-motion", "value": "reduce"}
        page.call("Emulation.setEmulatedMedia", features=[wanted])
        assert page.run(moving) == "0s"


@pytest.mark.thorough
def test_the_page_asks_every_two_seconds_never_twice_at_a_time_and_not_while_hidden(
    browser: Browser, busy: Server
):
    with browser.page(busy.url) as page:
        page.until(LOADED)
        assert 1 <= polls(page, 2.5) <= 2
        see(page, "hidden")
        polls(page, 0.1)
        assert polls(page, 2.2) == 0
        page.run(SLOW_FETCH)
        see(page, "visible")
        page.run("Promise.all([poll(), poll(), poll()])")
        page.until("window.most === 1")
        polls(page, 0.5)
        assert page.run("window.most") == 1


SLOW_FETCH = """(() => {
  const fast = window.fetch;
  let running = window.most = 0;
  window.fetch = async (...asked) => {
    window.most = Math.max(window.most, running += 1);
    await new Promise(done => setTimeout(done, 200));
    try { return await fast(...asked); } finally { running -= 1; }
  };
})()"""


def polls(page: Page, seconds: float) -> int:
    """Return how often the page asks within some time."""
    before = len(page.requested)
    page.browser.listen(seconds)
    return sum("/activity" in url for url in page.requested[before:])


def see(page: Page, state: str) -> None:
    page.run(
        f"Object.defineProperty(document, 'visibilityState', {{ value: '{state}', configurable: true }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


@pytest.mark.thorough
def test_a_page_that_runs_nothing_asks_every_five_seconds(browser: Browser, hostile: Server):
    with browser.page(hostile.url) as page:
        give_key(page)
        assert page.run("pause") == 5000
        assert polls(page, 1.2) == 0


def give_key(page: Page) -> None:
    page.until("!document.getElementById('key-panel').hidden")
    assert page.run("document.activeElement.id") == "key"
    page.write(KEY)
    page.press("Enter")
    page.until(LOADED)


def test_the_key_is_asked_for_kept_in_the_tab_and_sent(browser: Browser, hostile: Server):
    with browser.page(hostile.url) as page:
        page.until("!document.getElementById('key-panel').hidden")
        assert page.run("document.getElementById('panels').hidden")
        assert polls(page, 0.3) == 0
        assert not any("/activity" in url for url in page.requested), "a request without the key is refused"
        assert page.names(["textbox"]) == [("textbox", "API key")]
        page.write("wrong")
        page.press("Enter")
        page.until("document.getElementById('key-problem').innerText.startsWith('This is not a key')")
        give_key(page)
        assert page.run("Object.values({ ...sessionStorage }).join()") == KEY
        assert page.run("[localStorage.length, document.cookie].join()") == "0,"
        page.call("Page.reload")
        page.until(LOADED)
        assert page.run("document.getElementById('key-panel').hidden")


def test_a_key_shows_its_own_names_on_a_server_that_asks_for_none(browser: Browser, busy: Server):
    with browser.page(busy.url) as page:
        page.until(LOADED)
        assert "secret-name" not in text(page, "recent")
        until_focus(page, "change-key")
        page.press("Enter")
        assert page.run("document.activeElement.id") == "key"
        page.write("any-key")
        page.press("Enter")
        page.until("document.getElementById('recent').innerText.includes('secret-name')")
        assert text(page, "change-key") == "Forget the key"
        page.run("document.getElementById('change-key').click()")
        page.until("!document.getElementById('recent').innerText.includes('secret-name')")
        assert page.run("sessionStorage.length") == 0
        check_quiet(page, busy)


@pytest.mark.thorough
def test_texts_of_models_and_clients_stay_texts(browser: Browser, hostile: Server):
    """Session names, paths, differing texts, replies and reasoning."""
    with browser.page(hostile.url) as page:
        page.run("window.hurt = () => { window.isHurt = true; }")
        give_key(page)
        page.problems.clear()  # the page could not know that it needs a key
        page.run("document.querySelector('#recent button').click()")
        page.until("document.querySelectorAll('#recent pre').length === 2")
        page.run("document.getElementById('question').focus()")
        page.write(f"{SCRIPT}{INJECTION}")
        page.press("Enter")
        page.until("document.getElementById('chat-state').innerText === 'The reply is complete.'")
        assert NAME in text(page, "conversations")
        assert "onerror=hurt()>" in text(page, "refused")
        assert "<" in text(page, "recent").partition("Read before:")[2]
        assert f"{SCRIPT}{INJECTION} is text." in text(page, "log")
        assert f"{SCRIPT}{INJECTION}\n" in text(page, "log")
        thoughts = "document.querySelector('#log details')"
        assert not page.run(f"{thoughts}.open")
        assert page.run(f"{thoughts}.textContent") == f"Thoughts{INJECTION}."
        assert page.run("document.querySelectorAll('img, b, main script').length") == 0
        assert page.run("window.isHurt") is None
        check_quiet(page, hostile)


@pytest.mark.thorough
def test_the_policy_would_stop_what_the_script_does_not(browser: Browser, hostile: Server):
    """Markup, an inline handler and a request to another host, as if the page's script had a hole."""
    with browser.page(hostile.url) as page:
        for hole in (
            "document.body.innerHTML = '<p>x'",
            "fetch('http://127.0.0.1:9/')",
            "new Image().src = 'http://127.0.0.1:9/'",
            "document.body.setAttribute('onclick', 'hurt()'); document.body.click()",
        ):
            page.problems.clear()
            page.run(f"(() => {{ try {{ {hole} }} catch (error) {{ console.error(String(error)) }} }})()")
            page.browser.listen(0.1)
            assert page.problems, hole


def test_the_gaps_between_turns_are_the_times_between_them(browser: Browser, busy: Server):
    with browser.page(busy.url, 1000) as page:
        page.until(LOADED)
        lefts = page.run(TURNS_AT.replace("TIMES", "[0, 10, 100, 100.001]"))
        gaps = [later - earlier for earlier, later in pairwise(lefts)]
        assert gaps[1] == pytest.approx(9 * gaps[0], rel=0.2)
        assert gaps[2] == pytest.approx(9, abs=1), "turns at one time stand side by side"
        axes = page.run("[...document.querySelectorAll('#conversations .axis')].map(one => one.innerText)")
        counts = page.run("[...known.conversations.values()].reverse().map(one => one.turns.length)")
        times = [len(re.findall(r"\d\d:\d\d:\d\d", axis)) for axis in axes]
        assert times == [min(count, 2) for count in counts], "of the first turn and of the last"


TURNS_AT = """(() => {
  const list = document.querySelector("#conversations ol").cloneNode();
  document.querySelector('#conversations').append(list);
  showTurns(list, TIMES.map(at => (
    { ended_at: at, cached_tokens: 5, new_tokens: 5, again_tokens: 0, reason: null })));
  return [...list.children].map(one => one.getBoundingClientRect().left);
})()"""


@pytest.mark.thorough
def test_records_that_come_later_join_those_that_are_there(browser: Browser, hostile: Server):
    with browser.page(hostile.url) as page:
        give_key(page)
        turns = "document.querySelectorAll('#conversations .turns li').length"
        before = page.run(turns)
        page.run("document.querySelector('#recent button').focus()")
        talk(hostile, "new", "new", "later", KEY)
        refused(hostile, "/later", KEY)
        page.run("poll()")
        page.until(f"{turns} === {before} + 3")
        assert "GET /later" in text(page, "refused").splitlines()[0]
        recent = text(page, "recent")
        assert recent.count(" later\n") == 3
        assert recent.index(" later\n") < recent.index(f" {NAME}\n")
        assert page.run("document.activeElement.innerText").startswith("Show what differs"), (
            "it has lost the focus"
        )
        assert page.run("document.querySelectorAll('#recent > li').length") == page.run("known.recent.size")


@contextmanager
def hosting(folder: Path) -> Generator[Server]:
    """A server of the models in this folder that has loaded the one called `one`."""
    with tried_once(), serving(folder / "one", model_dir=str(folder)) as server:
        yield server


def button_of(action: str, name: str) -> str:
    wanted = f"one.textContent === '{action} {name}' && !one.hidden"
    return f"[...document.querySelectorAll('#models button')].find(one => {wanted})"


@pytest.mark.thorough
def test_models_are_loaded_and_unloaded_with_a_click(browser: Browser, tiny_model: TinyModel, tmp_path: Path):
    for name in ("one", "lab/two"):
        shutil.copytree(tiny_model("qwen3"), tmp_path / name)
    with hosting(tmp_path) as server, browser.page(server.url) as page:
        page.until(f"!!({button_of('Load', 'lab/two')})")
        page.run(f"({button_of('Load', 'lab/two')}).click()")
        page.until(f"!!({button_of('Unload', 'lab/two')})", 30)
        assert text(page, "models-state") == "Done: load lab/two."
        assert states(server) == {"one": "loaded", "lab/two": "loaded"}
        page.run(f"({button_of('Unload', 'one')}).click()")
        page.until(f"!!({button_of('Load', 'one')})", 30)
        assert states(server) == {"one": "available", "lab/two": "loaded"}
        page.run(f"({button_of('Unload', 'lab/two')}).click()")
        page.until(f"!!({button_of('Load', 'lab/two')})", 30)
        assert states(server) == {"one": "available", "lab/two": "available"}, "the last one too"
        page.run(f"({button_of('Load', 'lab/two')}).click()")
        page.until(f"!!({button_of('Unload', 'lab/two')})", 30)
        (tmp_path / "one" / "config.json").unlink()
        page.run(f"({button_of('Load', 'one')}).click()")
        page.until("document.getElementById('models-state').innerText.includes('config.json')", 30)


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.get("/v1/models")["data"]}


def say_in_chat(page: Page, question: str) -> None:
    page.run("document.getElementById('question').focus()")
    page.write(question)
    page.press("Enter")
    page.until("document.getElementById('chat-state').innerText === 'The reply is complete.'", 30)


def test_a_chat_asks_the_chosen_model_names_who_answers_and_outlives_a_reload(
    browser: Browser, chain_model: ChainModel, tmp_path: Path
):
    for name, word in (("one", "First."), ("two", "Second.")):
        shutil.copytree(chain_model({"\n": [word]}), tmp_path / name)
    with hosting(tmp_path) as server, browser.page(server.url) as page:
        page.until("document.querySelectorAll('#chat-model option').length === 3")
        say_in_chat(page, "Hello")
        page.run("document.getElementById('chat-model').value = 'two'")
        page.run("document.getElementById('chat-model').dispatchEvent(new Event('change'))")
        say_in_chat(page, "And you?")
        log = "You\n\nHello\n\none\n\nFirst.\n\nYou\n\nAnd you?\n\ntwo\n\nSecond."
        assert text(page, "log").split() == log.split()
        session = page.run("session")
        page.call("Page.reload")
        page.until("document.querySelectorAll('#chat-model option').length === 3")
        assert text(page, "log").split() == log.split()
        assert page.run("[session, document.getElementById('chat-model').value]") == [session, "two"]
        say_in_chat(page, "Once more")
        assert text(page, "log").split()[-2:] == ["two", "Second."]
        page.run("document.getElementById('fresh').click()")
        assert page.run("sessionStorage.length") == 0
        check_quiet(page, server)


def test_sessions_are_called_what_the_terminal_calls_them(browser: Browser, busy: Server):
    """To a key that has not sent them by their digits alone."""
    lines = [line for line in busy.printed().splitlines() if " written " in line]
    with browser.page(busy.url) as page:
        page.until(LOADED)
        recent, conversations = text(page, "recent"), text(page, "conversations")
    (story, secret) = (next(line for line in lines if name in line) for name in ("story", "secret-name"))
    assert f"Session {story.split()[3]} story" in recent
    assert f"Session {story.split()[3]} story" in conversations
    assert f"Session {secret.split()[3]}\n" in recent
    assert "Python-urlli · chat/completions" in recent
    assert "read at" in recent and "tok/s" in recent


def test_a_running_request_shows_its_program_its_model_and_its_speed(browser: Browser, busy: Server):
    with browser.page(busy.url) as page:
        page.until("document.getElementById('running').innerText.includes('tok/s')", 20)
        assert "completions · " in text(page, "running")


@pytest.mark.thorough
def test_a_finger_hits_every_button_of_a_phone(browser: Browser, busy: Server):
    small = (
        "[...document.querySelectorAll('button, select, textarea, input')]"
        ".filter(one => one.checkVisibility())"
        ".map(one => [one.getBoundingClientRect(), one.textContent])"
        ".filter(([box]) => box.height < 44 || box.width < 44).map(([, text]) => text)"
    )
    with browser.page(busy.url, 360) as page:
        page.until(LOADED)
        assert page.run(small) == []
