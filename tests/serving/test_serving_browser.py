"""The page in a headless Chromium: a chat with the embedded model, the comparison, the load, keys, and a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from browser_support import Page, browser, listening, page
from cli_support import WORDS, Letters, toy
from outpace.engine.scheduler import Limits
from outpace.engine.shared_decoder import SharedDecoder
from outpace.model import Model
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from outpace.serving.tenants import Tenants, Terms
from outpace.targets.table import TableTarget, random_table
from serving_support import KEYS

__all__ = ["browser", "page"]
pytestmark = pytest.mark.model

REPEAT = "Repeat this list three times: apple, banana, cherry, date, elderberry."
CLEAR = "rgba(0, 0, 0, 0)"


@contextmanager
def served(model: Model, tenants: Tenants | None = None) -> Iterator[str]:
    """A server of the model that drafts four tokens, whatever they cost on this machine."""
    before = model.shared
    model.shared = SharedDecoder(model.target, model.tokenizer, Limits())
    try:
        with listening(Service([model], tenants, Defaults("pld", {"num_draft_tokens": 4}))) as found:
            yield found
    finally:
        model.shared = before


@pytest.fixture(scope="module")
def where(smollm2: Model) -> Iterator[str]:
    with served(smollm2) as found:
        yield found


def asked(where: str, *messages: str) -> str:
    """The API's next answer in a conversation that the user began, as the page asks for it."""
    told = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 60, "messages": told}
    answer = httpx.post(f"{where}/v1/chat/completions", json=body, timeout=120).json()
    return str(answer["choices"][0]["message"]["content"])


def opened(page: Page, where: str) -> None:
    page.open(where)
    page.until(lambda: page.all("#method option"))
    page.fill("#max-tokens", "60")


def test_an_answer_is_colored_by_who_drafted_it(page: Page, where: str) -> None:
    opened(page, where)
    page.send(REPEAT)
    assert page.text(".bubble") == REPEAT
    assert page.content(".answer") == asked(where, REPEAT)
    tokens = page.all(".token")
    drafted = page.all(".token[data-source=pld]")
    assert 0 < len(drafted) < len(tokens) == len(drafted) + len(page.all(".token[data-source=target]"))
    assert page.style(drafted[0], "background-color") != CLEAR
    assert page.style(drafted[0], "border-bottom-style") == "solid"
    assert page.style(page.one(".token[data-source=target]"), "background-color") == CLEAR
    legend = {one.get_attribute("data-source"): one.text for one in page.all(".legend li")}
    assert legend.keys() == {"target", "pld"}
    assert f"{len(drafted)} token" in legend["pld"]
    assert "tokens per round" in page.text(".figures")


def test_a_token_tells_who_drafted_it_under_the_pointer(page: Page, where: str) -> None:
    from selenium.webdriver import ActionChains

    opened(page, where)
    page.send(REPEAT)
    ActionChains(page.driver).move_to_element(page.all(".token[data-source=pld]")[-1]).perform()
    page.until(lambda: page.one("#tip").is_displayed())
    assert "Drafted by pld" in page.text("#tip")
    assert "Round" in page.text("#tip")


def test_a_conversation_goes_on_and_starts_again(page: Page, where: str) -> None:
    opened(page, where)
    page.send("Name three fruits.")
    page.send("Name two more.")
    first, second = (one.get_attribute("textContent") for one in page.all(".answer"))
    assert first == asked(where, "Name three fruits.")
    assert second == asked(where, "Name three fruits.", first, "Name two more.")
    page.one("#new-chat").click()
    assert not page.all(".bubble")
    assert page.one("#welcome").is_displayed()


def test_markup_in_a_message_is_shown_as_text(page: Page, where: str) -> None:
    markup = "<script>document.title = 'changed'</script><img src=x onerror=\"document.title = 'changed'\">"
    opened(page, where)
    page.send(f"Repeat: {markup}")
    assert page.content(".bubble") == f"Repeat: {markup}"
    assert not page.all("#thread script, #thread img")
    assert page.driver.title == "outpace"
    page.one("#tab-compare").click()
    page.send(f"Repeat: {markup}")
    assert page.content("#asked") == f"Repeat: {markup}"
    assert not page.all("#compare script, #compare img")
    assert page.driver.title == "outpace"


def test_a_comparison_shows_both_speeds_and_that_the_texts_are_identical(page: Page, where: str) -> None:
    opened(page, where)
    page.one("#tab-compare").click()
    page.send(REPEAT)
    assert "identical" in page.text("#verdict .same")
    assert page.content("#side-off .answer") == page.content("#side-on .answer") == asked(where, REPEAT)
    for side in ("off", "on"):
        assert float(page.text(f"#side-{side} [data-figure=speed]").replace(",", "")) > 0
    assert page.text("#side-off [data-figure=round]") == "1.00"
    assert float(page.text("#side-on [data-figure=round]")) > 1
    assert not page.all("#side-off .token[data-source=pld]")
    assert page.all("#side-on .token[data-source=pld]")


def test_speculation_may_be_off_or_another_method(page: Page, where: str) -> None:
    from selenium.webdriver.support.select import Select

    opened(page, where)
    Select(page.one("#method")).select_by_value("off:")
    page.send(REPEAT)
    assert not page.all(".token[data-source=pld]")
    Select(page.one("#method")).select_by_value("recycling")
    page.send(REPEAT)
    assert page.all(".token[data-source=recycling]")


def test_a_lossy_method_is_marked_and_its_answers_say_so(page: Page) -> None:
    from selenium.webdriver.support.select import Select

    sure = TableTarget(len(WORDS), random_table(len(WORDS), seed=2, sharpness=20.0), context_length=400)
    named = {"draft_model": Model("draft", sure, Letters(), frozenset(), {})}
    model = Model("toy", toy().target, Letters(), frozenset(), {})  # without an end, so that no two samples are equal
    rule = "lossy: rollback(distance=2)"
    with listening(Service([model], defaults=Defaults("pld", named=named))) as where:
        opened(page, where)
        page.send("abc")
        assert "lossy" not in page.text(".figures")
        page.one("#tab-compare").click()
        page.fill("#temperature", "1")
        page.send("abc")
        assert "With temperature 0 both are the same." in page.text("#verdict p")
        Select(page.one("#method")).select_by_visible_text("bild (lossy)")
        page.send("abc")
        assert "Speculation is lossy here: with temperature 0 they may differ, too." in page.text("#verdict p")
        page.fill("#temperature", "0")
        page.send("abc")
        assert "Speculation is lossy here, so they may." in page.text("#verdict p")
        assert not page.all("#verdict .differ")
        assert rule in page.text("#side-on .figures")
        assert not page.all("#side-off .figures")
        page.one("#tab-chat").click()
        page.send("abc")
        assert page.all(".message .figures")[-1].text.endswith(rule)
        page.close()  # before the server, which it would go on asking for the load


def test_an_answer_is_stopped(page: Page, where: str) -> None:
    opened(page, where)
    page.fill("#max-tokens", "4000")
    page.fill("#message", "Count from 1 to 1000, one number after the other.")
    page.one("#send").click()
    page.until(lambda: page.all(".token"))
    page.one("#stop").click()
    page.until(lambda: page.one("#send").is_displayed())
    assert "stopped" in page.text(".figures")
    page.until(lambda: 'num_requests_running{model_name="smollm2"} 0.0' in httpx.get(f"{where}/metrics").text)


def test_a_refusal_is_told_and_the_message_is_not_lost(page: Page, where: str) -> None:
    opened(page, where)
    page.fill("#max-tokens", "900000")
    page.send("Hello")
    assert "context" in page.text("#problem")
    assert page.one("#message").get_attribute("value") == "Hello"
    assert not page.all(".bubble")


def test_the_load_is_that_of_the_metrics(page: Page, where: str) -> None:
    opened(page, where)
    page.send(REPEAT)
    page.until(lambda: all(page.text(f"[data-figure={one}]") != "–" for one in ("accepted", "rounds", "requests")))

    def shown(name: str) -> float:
        return float(page.text(f"[data-figure={name}] + td").replace(",", "").removesuffix("%"))

    found = httpx.get(f"{where}/metrics").text
    of = {name: float(value) for name, value in re.findall(r"^outpace:(\w+)_total{[^,}]*} (\S+)$", found, re.MULTILINE)}
    accepted, rounds = of["spec_decode_num_accepted_tokens"], of["spec_decode_num_rounds"]
    assert shown("tokens") == of["generation_tokens"]
    assert shown("accepted") == pytest.approx(100 * accepted / of["spec_decode_num_draft_tokens"], abs=0.51)
    assert shown("rounds") == pytest.approx(100 * of["spec_decode_num_drafts"] / rounds, abs=0.51)
    assert shown("length") == pytest.approx(1 + accepted / rounds, abs=0.0051)


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_everything_fits(page: Page, where: str, dark: bool) -> None:
    page.resize(390, 844, dark=dark)
    opened(page, where)
    background = page.style(page.one("body"), "background-color")
    assert (background == "rgba(255, 255, 255, 1)") != dark
    page.send(REPEAT)
    for view in ("chat", "compare", "load"):
        page.one(f"#tab-{view}").click()
        assert page.one(f"#{view}").is_displayed()
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390


def test_on_a_phone_fields_are_level_and_the_tabs_stay_in_their_place(page: Page, where: str) -> None:
    page.resize(390, 844)
    opened(page, where)
    places = [page.one(f"#{field}").rect for field in ("temperature", "max-tokens", "method")]
    assert len({(one["y"], one["height"]) for one in places}) == 1
    tabs = page.one("#tab-chat").rect
    for view in ("compare", "load"):
        page.one(f"#tab-{view}").click()
        assert page.one("#tab-chat").rect == tabs


def test_keys_are_asked_for_and_kept_for_the_tab_only(page: Page, smollm2: Model) -> None:
    tenants = Tenants({name: Terms(key=key) for name, key in KEYS.items()})
    with served(smollm2, tenants) as where:
        page.open(where)
        page.until(lambda: "asks for a key" in page.text("#key-reason"))
        page.fill("#key-value", "wrong-key")
        page.one("#key button").click()
        page.until(lambda: "does not know" in page.text("#key-reason"))
        page.fill("#key-value", KEYS["ann"])
        page.one("#key button").click()
        page.until(lambda: page.all("#method option"))
        page.send("Hello")
        assert page.text(".answer")
        kept = page.driver.execute_script("return [localStorage.length, document.cookie, sessionStorage.length]")
        assert kept == [0, "", 1]
        page.close()
