"""The web chat in a real Chromium: type, stream, stop, compare, record."""

import json
from pathlib import Path

from http_client import num_running


def settings(page, **values):
    page.click("summary")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))
        page.dispatch_event(f"#{name}", "change")
    page.click("summary")


def wait_for_answers(page, count):
    page.wait_for_function(
        f"document.querySelectorAll('.answer').length === {count} && "
        "!document.querySelector('.writing')"
    )


def test_compare_and_record(page, compared):
    settings(page, max_tokens=8, seed=3)
    page.fill("#prompt", "what is <b>the</b> sun?")
    page.keyboard.press("Enter")
    wait_for_answers(page, 2)
    page.wait_for_function("document.querySelectorAll('.score')[1].textContent")
    first, second = page.locator(".answer .text").all_inner_texts()
    assert first == second  # one model, one seed
    assert page.locator(".user").inner_text() == "what is <b>the</b> sun?"
    scores = page.locator(".score").all_inner_texts()
    assert scores[0] == scores[1]
    assert scores[0].startswith("reward ")

    # Another temperature for the second turn; prefer the second model's answer.
    settings(page, seed="", temperature=1.5)
    page.fill("#prompt", "and the moon?")
    page.click("#send")
    wait_for_answers(page, 4)
    page.locator(".prefer").nth(3).click()
    page.wait_for_function("document.querySelector('#status').textContent.includes('recorded')")
    texts = page.evaluate("state.turns.flatMap(turn => turn.answers.map(answer => answer.text))")
    shown = page.locator(".answer .text").all_text_contents()
    rows = list(map(json.loads, Path(compared.config.preferences).read_text().splitlines()))
    row = rows[-1]
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
    assert row["prompt"][1]["content"] == texts[0]
    assert row["chosen"][0]["content"] == texts[3]
    assert row["rejected"][0]["content"] == texts[2]
    assert (row["chosen_model"], row["rejected_model"]) == ("other", "tiny")
    assert page.locator(".answer.chosen").count() == 1

    # The conversation is kept in the browser.
    page.reload()
    page.wait_for_selector("#models input")
    assert page.locator(".answer .text").all_text_contents() == shown
    assert page.input_value("#temperature") == "1.5"
    page.click("#new")
    assert page.locator(".answer").count() == 0


def test_under_its_own_policy(browser, compared):
    """The policy that the server sends allows what the page does."""
    opened = browser.new_page()
    problems = []
    opened.on("console", lambda m: m.type == "error" and problems.append(m.text))
    opened.goto(compared.url)
    opened.locator("#models input").first.wait_for()
    opened.fill("#prompt", "sun")
    opened.keyboard.press("Enter")
    opened.locator(".score", has_text="reward").first.wait_for()
    assert not problems
    opened.close()


def test_stop_by_key_and_copy(page, compared, before, may_step):
    worker = compared.server.models["tiny"].worker
    answered = worker.stats.answer_tokens

    def pause():
        if worker.stats.answer_tokens - answered >= 30:
            may_step.wait()

    before(worker, "step", pause)
    page.locator("#models input").nth(1).uncheck()
    settings(page, max_tokens=100, system="be brief")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps(json.loads(route.request.post_data) | {"ignore_eos": True})
        ),
    )
    page.fill("#prompt", "tell me everything")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.answer .text')?.textContent.length > 20")
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('#send').hidden")
    while num_running(worker):
        page.wait_for_timeout(10)
    may_step.set()
    wait_for_answers(page, 1)
    assert page.locator(".problem").count() == 0
    assert page.is_visible("#send")
    text = page.evaluate("state.turns[0].answers[0].text")
    page.locator("text=Copy").click()
    page.wait_for_function("document.querySelector('#status').textContent === 'copied'")
    assert page.evaluate("navigator.clipboard.readText()").strip() == text.strip()
    assert worker.stats.answer_tokens - answered < 100
