"""The page: complete, self-contained, and safe from what a model wrote; the command's mistakes."""

import importlib.util
import json
import os
import re
import shutil
from contextlib import nullcontext, suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from damages import DAMAGES
from python_process import python
from run_folders import write_rows, write_run

from dschat.config import UserError
from dschat.reporting.figures import sections_of
from dschat.reporting.page import _numbers, write_report
from dschat.reporting.run_files import STEPS, read_runs

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
ATTACK = "<script>document.title = 'attacked'</script>"
CHROMIUM = "/usr/bin/chromium"


def page_of(*folders) -> str:
    line = write_report([str(folder) for folder in folders])
    page = Path(line.removeprefix("report: "))
    assert page.parent == Path(folders[0])
    assert (page.name == "report.html") == (len(folders) == 1)
    return page.read_text()


class Elements(HTMLParser):
    """Collects scripts, and every address that a browser would load."""

    def __init__(self):
        super().__init__()
        self.scripts, self.addresses, self._reading = [], [], False

    def handle_starttag(self, tag, attrs):
        self._reading = tag == "script"
        if self._reading:
            self.scripts.append("")
        self.addresses += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        self._reading = False

    def handle_data(self, data):
        if self._reading:
            self.scripts[-1] += data


def test_what_went_wrong_and_the_best_evaluation_stand_on_top(tmp_path):
    """Of each run by its name where there are several, of a step by its own; nothing of a run that
    is well.
    """
    well, ill = write_run(tmp_path / "well"), write_run(tmp_path / "ill")
    assert "What went wrong" not in page_of(well)
    line = {"step": 28, "warning": "the actor's gradient is 0 (since iteration 1)"}
    write_rows(ill / "step3_rlhf" / "warnings.jsonl", [line])
    rows = [{"step": n, "eval/score": v} for n, v in ((0, 0.25), (2, 0.75), (4, 0.5))]
    write_rows(ill / "step3_rlhf" / "metrics.jsonl", rows)
    text = page_of(ill)
    found = text.index("gradient is 0 (since iteration 1)")
    assert text.index("What went wrong") < found < text.index("In numbers")
    assert "Verdict" not in text
    assert "0.25 → 0.5 (best 0.75 at 2)" in text
    assert "<li>ill: step3_rlhf: the actor&#39;s gradient is 0" in page_of(well, ill)


def test_the_verdict_stands_on_top(tmp_path):
    """As the run stored it, once, even where it is a warning; the page has no rules of its own."""
    out, other = write_run(tmp_path / "out"), write_run(tmp_path / "other")
    verdict = "Held-out answers got worse & <b>worse</b>."
    rows = [{"step": 2, "warning": "far"}, {"step": 3, "verdict": verdict, "warning": verdict}]
    write_rows(out / "step3_rlhf" / "warnings.jsonl", rows)
    text = page_of(out)
    shown = "Held-out answers got worse &amp; &lt;b&gt;worse"
    assert text.count(shown) == 1
    assert text.index(shown) < text.index("What went wrong") < text.index("<li>step3_rlhf: far")
    assert text.index("<li>step3_rlhf: far") < text.index("In numbers")
    assert "Verdict on out." in re.sub("<.?b>", "", page_of(out, other))


def test_the_page_of_several_runs_has_a_name_of_its_own(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    alone = page_of(a)
    both = page_of(a, b)
    assert (a / "report.html").read_text() == alone != both
    assert sorted(path.name for path in a.glob("*.html")) == ["report-with-b.html", "report.html"]
    assert not (b / "report.html").exists()


def test_the_questions_stand_on_top(tmp_path):
    rows = [{"step": 0, "eval/score": 0.5, "eval/kl": -1.757e-7, "eval/rlhf_reward": 0.5}]
    rows += [{"step": 4, "eval/score": 2.5, "eval/kl": 40.0, "eval/rlhf_reward": -1.5}]
    rows += [{"step": n, "objective/scores": n / 2} for n in (1, 4)]
    write_rows(tmp_path / "step3_rlhf" / "metrics.jsonl", rows)
    text = re.sub(r"\s+", " ", page_of(tmp_path))
    learned = text.index("Did it learn, and when should it have")
    figures = text.index('<section id="step3_rlhf">')
    for row in (
        "<td>held-out score</td><td>0.5 → 2.5 (best)</td>",
        "<td>held-out score less the KL penalty</td><td>0.5 → -1.5 (best 0.5 at 0)</td>",
        "<td>score in training</td><td>0.5 → 2</td>",
        "<td>KL to the reference model, nats per answer</td><td>0 → 40</td>",
    ):
        assert learned < text.index(row) < figures


OTHERS = ("training_config.yaml", "COMPLETE", "checkpoints/step_000002/manifest.json")
DEMO = Path(__file__).with_name("demo")  # metrics of train.py's demo, a few steps of it


def prefixes(name):
    lines = (DEMO / f"{name}.jsonl").read_text().splitlines(keepends=True)
    return ["".join(lines[:count]) for count in range(1, len(lines) + 1)]


def test_numbers_and_figures_of_every_prefix_of_a_log(tmp_path):
    """Alone, and beside a run that has just begun: a report is written while a run goes on."""
    whole = {name: prefixes(name)[-1] for name in STEPS}
    for name in STEPS:
        for text in prefixes(name):
            for run, steps in (("a", {name: text}), ("b", whole | {name: text})):
                for step, rows in steps.items():
                    (tmp_path / run / step).mkdir(parents=True, exist_ok=True)
                    (tmp_path / run / step / "metrics.jsonl").write_text(rows)
            for folders in (["a"], ["b"], ["a", "b"], ["b", "a"]):
                runs = read_runs([str(tmp_path / folder) for folder in folders])
                cells = [cell for table in _numbers(runs) for row in table["rows"] for cell in row]
                assert all(isinstance(cell, str) for cell in cells)
        assert sections_of(read_runs([str(tmp_path / "a")]), 1000)
        shutil.rmtree(tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_page_of_every_prefix_of_a_log(name, tmp_path):
    (tmp_path / name).mkdir()
    for text in prefixes(name):
        for partial in (text, text + text[:9]):
            (tmp_path / name / "metrics.jsonl").write_text(partial)
            assert "Settings" in page_of(tmp_path)


def test_one_value_stands_alone(tmp_path):
    write_rows(tmp_path / "step1_sft/metrics.jsonl", [{"step": 0, "eval/loss": 5.0}])
    assert "<td>held-out loss after step 1, nats per token</td><td>5</td>" in page_of(tmp_path)


QUICK = ("starts.jsonl digits", "metrics.jsonl pipe", "samples.jsonl half", "COMPLETE folder")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=() if f"{name} {damage}" in QUICK else pytest.mark.slow)
        for name in (*(f"{kind}.jsonl" for kind in ("metrics", "samples", "starts")), *OTHERS)
        for damage in DAMAGES
    ],
)
def test_damaged_files_are_a_line(name, damage, tmp_path):
    out = write_run(tmp_path)
    (out / "step3_rlhf/COMPLETE").write_text('{"contents": {}}\n')
    place = out / "step3_rlhf/checkpoints/step_000002"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    DAMAGES[damage](out / "step3_rlhf" / name)
    with suppress(UserError) if name == "training_config.yaml" else nullcontext():
        page_of(out)


def test_what_a_model_wrote_is_data_not_markup(tmp_path):
    out = write_run(tmp_path / "out", answer=ATTACK, suffix=ATTACK)
    text = page_of(out)
    assert ATTACK not in text
    elements = Elements()
    elements.feed(text)
    assert len(elements.scripts) == 4  # figures, samples, plotly.js, the page's own
    samples = json.loads(elements.scripts[1])
    assert samples[0]["answers"][0]["answer"] == ATTACK
    assert "&lt;script&gt;" in text  # the setting


def test_the_page_loads_nothing(tmp_path):
    elements = Elements()
    elements.feed(page_of(write_run(tmp_path)))
    assert elements.addresses == []


def test_the_page_has_numbers_settings_and_versions(tmp_path):
    a, b = write_run(tmp_path / "a", seed=1, new=None), write_run(tmp_path / "b", seed=2)
    text = re.sub(r"\s+", " ", page_of(a, b))
    # generate 1 + 2 + 3, score 3 x 2, train 3 x 3 seconds
    shares = "<td>29%, 29%, 43%</td>"
    assert f"<td>share of generate, score, train</td>{shares}{shares}" in text
    assert '<tr class="changed"> <td>seed</td><td>1</td><td>2</td></tr>' in text
    assert "<td>new</td><td>null</td><td>-</td>" in text
    assert text.count('<tr class="changed">') == 1
    assert "<td>torch</td><td>9.9</td><td>9.9</td>" in text


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)
    )
    with pytest.raises(UserError, match=r"a report needs plotly; .*pip install 'dschat\[report\]'"):
        page_of(write_run(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path):
    out = write_run(tmp_path)
    (out / "report.html").mkdir()
    with pytest.raises(UserError, match=r"cannot be written"):
        page_of(out)


def test_the_command(tmp_path):
    write_run(tmp_path / "out")
    done = python("-m", "dschat", "report", "out", cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("report: out/report.html\n", "", 0)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(CHROMIUM), reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path):
    """Offline, in both themes and at phone width: no error, no attack, figures, samples, SVG."""
    playwright = pytest.importorskip("playwright.sync_api")
    a, b = (
        write_run(tmp_path / "a", answer=f"{ATTACK}\u202e"),
        write_run(tmp_path / ATTACK.replace("/", "|")),
    )
    page_of(a, b)
    errors = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM)
        context = browser.new_context(
            viewport={"width": 390, "height": 800}, color_scheme="dark", offline=True
        )
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(next(a.glob("*.html")).as_uri())
        page.evaluate("document.querySelectorAll('.chart').forEach(draw)")
        page.wait_for_selector("#step3_rlhf-breakdown .main-svg")
        drawn = page.evaluate("document.querySelectorAll('.chart .main-svg').length")
        assert drawn >= page.locator("figure").count()
        back = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(back) == "rgb(20, 23, 28)"
        assert page.locator("[data-title^='Share']").count() == 0  # plotly's upload
        page.hover("#step3_rlhf-breakdown .chart")
        with page.expect_download() as download:
            page.click("#step3_rlhf-breakdown [data-title='Save as SVG']")
        assert download.value.suggested_filename == "step3_rlhf-breakdown.svg"
        saved = download.value.path().read_text()
        assert "fill: rgb(255, 255, 255)" in saved[:500]  # the background
        assert "rgb(68, 68, 68)" in saved  # text and axes
        assert "rgb(228, 231, 235)" not in saved  # the dark page's text
        page.click("#theme")
        assert page.evaluate(back) == "rgb(255, 255, 255)"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        left = page.locator(".column").first
        assert left.locator(".tokens span").first.text_content() == ATTACK + r"\u202e"
        assert left.locator(".tokens span").first.get_attribute("style").startswith("background")
        left.locator("select").select_option(index=3)
        assert left.locator(".tokens span").first.text_content() == "4"
        assert page.title() != "attacked"
        browser.close()
    assert errors == []
