"""Turns of the web chat: retry, edit, delete, fail, reload. In a real Chromium."""

import json

import pytest


@pytest.fixture
def chat(page):
    """``chat.answers``: what a model answers, an error if it is a tuple of status and message;
    ``chat.asked``: the messages of each request.
    """
    page.answers, page.asked = {"tiny": "fine", "other": "fine"}, []

    def respond(route):
        body = route.request.post_data_json
        page.asked.append(body["messages"])
        answer = page.answers[body["model"]]
        if isinstance(answer, tuple):
            status, message = answer
            route.fulfill(status=status, json={"error": {"message": message}})
        else:
            event = json.dumps({"choices": [{"delta": {"content": answer}}]})
            route.fulfill(body=f"data: {event}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", respond)
    page.route("**/api/score", lambda route: route.fulfill(json={"scores": []}))
    page.locator("#models input").nth(1).uncheck()
    return page


def say(page, text):
    count = page.locator(".turn").count()
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelectorAll('.turn').length === {count + 1}")
    idle(page)


def idle(page):
    page.wait_for_function("!running && !document.querySelector('.writing')")


def turns(page):
    return page.evaluate("state.turns.map(turn => [turn.prompt, turn.answers[0].text])")


def test_retry_edit_delete_and_undo(chat):
    for text in ("one", "two", "three"):
        chat.answers["tiny"] = text.upper()
        say(chat, text)
    chat.answers["tiny"] = "AGAIN"
    chat.locator(".turn").nth(2).get_by_text("Retry").click()
    idle(chat)
    assert [m["content"] for m in chat.asked[-1]] == ["one", "ONE", "two", "TWO", "three"]
    assert turns(chat) == [["one", "ONE"], ["two", "TWO"], ["three", "AGAIN"]]

    chat.locator(".turn").nth(0).get_by_text("Delete").click()
    assert turns(chat) == [["two", "TWO"], ["three", "AGAIN"]]
    chat.get_by_text("Undo").click()
    assert [prompt for prompt, _ in turns(chat)] == ["one", "two", "three"]

    # An edit replaces the turn and those after it; Escape leaves all as it was.
    chat.fill("#prompt", "a draft")
    edit = chat.locator(".turn").nth(1).get_by_text("Edit")
    edit.click()
    assert chat.input_value("#prompt") == "two"
    assert chat.locator(".turn.replaced").count() == 2
    chat.keyboard.press("Escape")
    assert chat.input_value("#prompt") == "a draft"
    assert chat.locator(".turn.replaced").count() == 0
    edit.click()
    chat.fill("#prompt", "zwei")
    chat.keyboard.press("Enter")
    chat.wait_for_function("state.turns.length === 2")
    idle(chat)
    assert turns(chat) == [["one", "ONE"], ["zwei", "AGAIN"]]
    assert [m["content"] for m in chat.asked[-1]] == ["one", "ONE", "zwei"]
    assert chat.input_value("#prompt") == "a draft"
    chat.get_by_text("Undo").click()
    assert [prompt for prompt, _ in turns(chat)] == ["one", "two", "three"]


def test_without_a_model_nothing_is_replaced(chat):
    say(chat, "one")
    say(chat, "two")
    chat.locator("#models input").first.uncheck()
    chat.locator(".turn").first.get_by_text("Retry").click()
    assert "tick a model" in chat.locator("#status").inner_text()
    chat.locator(".turn").first.get_by_text("Edit").click()
    chat.fill("#prompt", "eins")
    chat.keyboard.press("Enter")
    assert "tick a model" in chat.locator("#status").inner_text()
    assert chat.input_value("#prompt") == "eins"
    assert turns(chat) == [["one", "fine"], ["two", "fine"]]


def test_undo_stops_the_answer(chat):
    say(chat, "one")
    chat.unroute("**/v1/chat/completions")
    chat.route("**/v1/chat/completions", lambda route: None)  # an answer that does not begin
    chat.locator(".turn").first.get_by_text("Retry").click()
    chat.wait_for_selector(".writing")
    chat.get_by_text("Undo").click()
    idle(chat)
    assert turns(chat) == [["one", "fine"]]
    assert chat.locator(".answer .text").inner_text() == "fine"


def test_undo_where_the_browser_is_full(chat):
    """It says so once; the page works without."""
    chat.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }"
    )
    say(chat, "one")
    assert "keeps no conversation" in chat.locator("#status").inner_text()
    chat.answers["tiny"] = "again"
    chat.locator(".turn").first.get_by_text("Retry").click()
    chat.wait_for_function("state.turns[0].answers[0].text === 'again'")
    idle(chat)
    chat.get_by_text("Undo").click()
    assert turns(chat) == [["one", "fine"]]


def test_an_older_tab_leaves_the_conversation_of_a_newer_one(chat):
    url, older = chat.url, chat.context.new_page()
    older.goto(url)
    older.wait_for_selector("#models input")
    say(chat, "one")
    chat.goto("about:blank")
    older.goto("about:blank")
    chat.goto(url)
    chat.wait_for_selector("#models input")
    assert turns(chat) == [["one", "fine"]]


@pytest.mark.parametrize("problem", ["the API key is missing or wrong", "does not answer"])
def test_without_the_servers_models_it_says_why(problem, chat):
    refusal = {"status": 401, "json": {"error": {"message": problem}}}
    chat.expected = "401" if "key" in problem else "ERR_FAILED"  # the browser logs it
    respond = (
        (lambda route: route.fulfill(**refusal)) if "key" in problem else (lambda r: r.abort())
    )
    chat.route("**/api/info", respond)
    chat.reload()
    chat.wait_for_function(f"$('status').textContent.includes('{problem}')")
    chat.evaluate("say('')")
    chat.fill("#prompt", "one")
    chat.keyboard.press("Enter")
    assert problem in chat.locator("#status").inner_text()
    chat.unroute("**/api/info")
    chat.evaluate("$('key').onchange()")
    chat.wait_for_selector("#models input")
    chat.keyboard.press("Enter")
    chat.wait_for_function("state.turns.length === 1")


def test_a_turn_that_failed_is_not_sent_again(chat):
    chat.expected = "status of 400"  # the browser logs it
    say(chat, "one")
    chat.answers["tiny"] = (400, "too long by 5 tokens")
    say(chat, "far too long")
    assert chat.locator(".problem").inner_text() == "too long by 5 tokens"
    assert "not sent" in chat.locator(".turn").nth(1).inner_text()
    chat.answers["tiny"] = ""
    say(chat, "empty")
    chat.answers["tiny"] = "fine"
    say(chat, "two")
    assert [m["content"] for m in chat.asked[-1]] == ["one", "fine", "two"]
    chat.locator(".turn").nth(1).get_by_text("Retry").click()
    idle(chat)
    assert turns(chat) == [["one", "fine"], ["far too long", "fine"]]


def test_of_two_answers_the_good_one_is_sent(chat):
    chat.expected = "status of 500"
    chat.locator("#models input").nth(1).check()
    chat.answers = {"tiny": (500, "failed"), "other": "good"}
    say(chat, "one")
    assert chat.locator(".prefer:disabled").count() == 2
    say(chat, "two")
    assert [m["content"] for m in chat.asked[-1]] == ["one", "good", "two"]


def test_a_stream_that_breaks_is_a_problem(chat):
    chat.unroute("**/v1/chat/completions")
    event = json.dumps({"choices": [{"delta": {"content": "half"}}]})
    chat.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {event}\n\n"))
    say(chat, "one")
    assert "before the answer did" in chat.locator(".problem").inner_text()


def test_the_last_turn_is_there_after_a_reload(page, compared, before, may_step):
    """While its answer is written."""
    worker = compared.server.models["tiny"].worker
    answered = worker.stats.answer_tokens

    def pause():
        if worker.stats.answer_tokens - answered >= 30:
            may_step.wait()

    before(worker, "step", pause)
    page.locator("#models input").nth(1).uncheck()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True})
        ),
    )
    page.fill("#prompt", "tell me everything")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.answer .text')?.textContent.length > 20")
    assert page.locator(".turn").get_attribute("aria-busy") == "true"
    page.reload()
    may_step.set()
    page.wait_for_selector("#models input")
    assert page.locator(".user").inner_text() == "tell me everything"
    assert len(page.locator(".answer .text").inner_text()) > 20
    assert page.locator(".writing").count() == 0


def test_examples_and_answers_as_written(chat):
    chat.answers["tiny"] = "2*3*4 <b>"
    chat.locator(".hint button").first.click()
    idle(chat)
    assert chat.locator(".user").inner_text() == chat.asked[0][0]["content"]
    text = chat.locator(".answer .text")
    assert text.inner_text() == "234 <b>"
    chat.click("summary")
    chat.check("#plain")
    assert text.inner_text() == "2*3*4 <b>"
    chat.reload()
    chat.wait_for_selector("#models input")
    assert text.inner_text() == "2*3*4 <b>"
