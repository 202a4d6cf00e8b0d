"""Answers in the page: Markdown becomes elements, and nothing of an answer runs or loads anything.
In a real Chromium.
"""

import pytest

SHOWN = {
    "**a** *b* `c` ~~d~~": "<p><strong>a</strong> <em>b</em> <code>c</code> <s>d</s></p>",
    "one\ntwo": "<p>one<br>\ntwo</p>",
    "1 < 2 & <b>x</b> &amp;": "<p>1 &lt; 2 &amp; &lt;b&gt;x&lt;/b&gt; &amp;</p>",
    "<think>\nyes\n</think>": "<p>&lt;think&gt;<br>\nyes<br>\n&lt;/think&gt;</p>",
    "```python\nx = '<i>'\n```": "<pre><code>x = '&lt;i&gt;'\n</code></pre>",
    "a\n```\nhalf of a fe": "<p>a</p>\n<pre><code>half of a fe</code></pre>",
    "3. c\n4. d": '<ol start="3">\n<li>c</li>\n<li>d</li>\n</ol>',
    "|a|b|\n|-|-:|\n|1|2|": "<div><table>\n<thead>\n<tr>\n<th>a</th>\n"
    '<th align="right">b</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n<td>1</td>\n'
    '<td align="right">2</td>\n</tr>\n</tbody>\n</table></div>',
    r"\(a_1*b*c\) \[\frac{1}{2}\] $$x\\y$$": r"<p>\(a_1*b*c\) \[\frac{1}{2}\] $$x\\y$$</p>",
    "[x](https://a.example/?q=1&r)": '<p><a href="https://a.example/?q=1&amp;r">x</a></p>',
    "https://a.example": '<p><a href="https://a.example">https://a.example</a></p>',
    "[x](javascript:hacked=1)": "<p>[x](javascript:hacked=1)</p>",
    "[x](/api/info)": "<p><a>x</a></p>",  # nothing of this server
    "![cat](http://a.example/c.png)": '<p><a href="http://a.example/c.png">image: cat</a></p>',
    "![cat](data:image/png;base64,AA)": "<p><a>image: cat</a></p>",
}
# As they are, and as markdown-it would pass them on with `html`.
PAYLOADS = [
    "<script>hacked = 1</script>",
    "<img src=http://evil.example/a.png onerror=hacked=1>",
    "<svg onload=hacked=1><use href=http://evil.example/#a></svg>",
    "<iframe src=http://evil.example></iframe><object data=http://evil.example></object>",
    "<a href=javascript:hacked=1 onclick=hacked=1 id=turns>x</a>",
    "<style>@import url(http://evil.example)</style><link rel=stylesheet href=http://evil.example>",
    "<form action=http://evil.example><input name=prompt autofocus onfocus=hacked=1></form>",
    "<p style='background:url(http://evil.example)' dir=ltr onmouseover=hacked=1>x</p>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=a>'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'><base href=http://evil.example>",
    "<video autoplay src=http://evil.example><source src=http://evil.example onerror=hacked=1>",
]
# Without what is the same for all links and blocks.
HTML = """text => {
  const box = document.createElement("div");
  document.querySelector("#turns").replaceChildren(box);
  box.append(rendered(text));
  const found = [...box.querySelectorAll("*")].flatMap(
      node => [node.tagName, ...[...node.attributes].map(a => a.name + "=" + a.value)]);
  for (const node of box.querySelectorAll("*"))
    for (const name of ["dir", "class", "target", "rel", "title"]) node.removeAttribute(name);
  return [box.innerHTML.trim(), found];
}"""


def test_markdown(page):
    found = {text: page.evaluate(HTML, text)[0] for text in SHOWN}
    assert found == SHOWN


@pytest.mark.parametrize("passes_html", [False, True])
def test_nothing_runs_or_loads(passes_html, page):
    """``passes_html``: the sanitizer alone; the page's policy is off in these tests."""
    page.evaluate("passes => { markdown.options.html = passes; }", passes_html)
    for payload in PAYLOADS:
        for text in (payload, f"a {payload}\n\n- {payload}\n\n|{payload}|\n|-|\n|{payload}|"):
            html, found = page.evaluate(HTML, text)
            assert passes_html or "&lt;" in html  # shown, not dropped
            names = {word.partition("=")[0] for word in found}
            assert names <= {
                *("A", "BR", "CODE", "DIV", "LI", "P", "S", "UL", "class", "dir", "href", "rel"),
                *("TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "target", "title"),
            }
            addresses = [word for word in found if word.startswith("href=")]
            assert all(a.startswith(("href=http://", "href=https://")) for a in addresses)
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None


def test_each_paragraph_has_its_direction(page):
    sides = page.evaluate(
        """text => {
          const place = document.querySelector("#turns");
          place.replaceChildren(rendered(text));
          return [...place.children].map(block => getComputedStyle(block).direction);
        }""",
        "left to right\n\n\u05e9\u05dc\u05d5\u05dd\n\n- \u0645\u0631\u062d\u0628\u0627",
    )
    assert sides == ["ltr", "rtl", "rtl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["word ", "*a **b ", "[", "![", ">", "`", "<", "|a", "- ", "\\(", "$$", "\\[a", "\n"]
)
def test_long_answers(piece, page):
    """50 kB of anything: seconds on a loaded machine, whatever it is."""
    text = (piece * 50_000)[:50_000]
    assert page.evaluate("text => { rendered(text); return true; }", text)
