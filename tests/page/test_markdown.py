"""Markdown of answers: the elements that it becomes or never becomes, and how it grows."""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import jaxserve
from tests.page.conftest import OpenPage
from tests.page.recorded import chunk, recorded, send

FOLDER = Path(jaxserve.__file__).parent / "server/page"
TEXT = """\
## Reverse a list

Take `xs[::-1]`, **or** *this* &amp; that:

```python
def reverse(xs):
    return xs[::-1]  # <b>
```

1. first
2. second
   - nested
   - [x] done

   more of the second

> quoted
> lines

| name | value |
|:-----|------:|
| `a`  | 1     |

#### Deeper
See [the page](https://example.org/a?b=1&amp;c=2 "title"), https://example.org or ~~that~~.
Line two<br>line three

---
![a picture](https://example.org/x.png)
"""

# Frames that follow each other at once: whatever is added is drawn before the next piece.
FRAMES = """() => {
    window.requestAnimationFrame = (draw) => {
        queueMicrotask(() => draw(Infinity));
        return 1;
    };
}"""
# Makes an element, feeds the pieces, and returns its contents before the end and after.
GROW = """async (pieces) => {
    const { Markdown } = await import("/page/markdown.js");
    const element = document.createElement("div");
    document.body.append(element);
    const prose = new Markdown(element);
    for (const piece of pieces) {
        prose.add(piece);
        await null;
    }
    const grown = element.innerHTML;
    prose.end();
    const ended = element.innerHTML;
    element.remove();
    return [grown, ended];
}"""


def grown(page: Page, pieces: list[str]) -> tuple[str, str]:
    before, after = page.evaluate(GROW, pieces)
    return before, after


def test_markdown_becomes_elements(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    recorded(page, [chunk(TEXT)], {})
    send(page, "How?")
    text = page.locator("article.assistant .text")
    expect(page.locator("#status")).to_contain_text("Answer complete")
    expect(text.locator("h4")).to_have_text("Reverse a list")
    expect(text.locator("h5")).to_have_text("Deeper")  # no level is skipped
    assert text.locator("pre code").text_content() == (
        "def reverse(xs):\n    return xs[::-1]  # <b>"
    )
    expect(text.locator(".code > div")).to_contain_text("python")
    expect(text.locator("p").first).to_have_text("Take xs[::-1], or this & that:")
    expect(text.locator("strong")).to_have_text("or")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol ul > li").last).to_have_text("☑ done")
    expect(text.locator("blockquote")).to_contain_text("quoted")
    assert text.locator("td").all_inner_texts() == ["a", "1"]
    assert text.locator("td").last.evaluate("cell => cell.style.textAlign") == "right"
    links = text.locator("a")
    hrefs = [links.nth(i).get_attribute("href") for i in range(links.count())]
    assert hrefs == [
        "https://example.org/a?b=1&c=2",
        "https://example.org/",
        "https://example.org/x.png",
    ]
    expect(links.last).to_have_text("image: a picture")


HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned=1'><img src=https://evil.example/a.png>",
    "<svg onload=window.pwned=1><animate onbegin=window.pwned=1 attributeName=x></svg>",
    "<svg><script>window.pwned=1</script></svg>",
    "<iframe src='javascript:window.top.pwned=1' srcdoc='<script>top.pwned=1</script>'></iframe>",
    "<style>body { display: none; background: url(https://evil.example/b) }</style>",
    "<link rel=stylesheet href=https://evil.example/c.css><base href=https://evil.example>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<form action=https://evil.example><button formaction=javascript:window.pwned=1>x</form>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1>",
    "<div style='position:fixed;inset:0;background:red'>over all</div>",
    "<details open ontoggle=window.pwned=1>x</details><input autofocus onfocus=window.pwned=1>",
    "<a href='javascript:window.pwned=1' id=text name=composer>x</a><p id=send>",
    "<template><script>window.pwned=1</script></template><!-- <img src=x> --><![CDATA[x]]>",
    "[a](javascript:window.pwned=1) [b](JaVaScRiPt:window.pwned=1)",
    "[c](java&#x73;cript:window.pwned=1) [d](javascript&colon;window.pwned=1)",
    "[e](<java\tscript:window.pwned=1>) [f]( javascript:window.pwned=1) [g](\x01javascript:x)",
    "[h](data:text/html,<script>window.pwned=1</script>) [i](vbscript:x) [j](file:///etc/passwd)",
    "[k](/v1/models) [l](//evil.example) [m](#send) [n](blob:x)",
    "<javascript:window.pwned=1> <data:text/html,x>",
    '![x](x"onerror="window.pwned=1) ![y](javascript:window.pwned=1) ![z](https://evil.example/d)',
    '[o](https://a.example/"onmouseover="window.pwned=1) [p](https://a.example "x\\" onclick=y")',
    "[q]: javascript:window.pwned=1\n\n[q] ![q]",
    "`<img src=x onerror=window.pwned=1>` **<script>window.pwned=1</script>**",
    "```<img src=x onerror=window.pwned=1>\n</code></pre><script>window.pwned=1</script>\n```",
    "```html onload=window.pwned=1\n<b>\n```",
    "| <img src=x onerror=window.pwned=1> |\n|---|\n| <script>window.pwned=1</script> |",
    "# <svg onload=window.pwned=1>\n\n> <img src=x onerror=window.pwned=1>\n\n- <script>x</script>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt; &#60;img src=x onerror=window.pwned=1&#62;",
    "www.evil.example/<img src=x> me@evil.example <https://evil.example/?<script>>",
]
ALLOWED = frozenset(
    "P BR STRONG EM DEL CODE PRE A SPAN H4 H5 H6 BLOCKQUOTE UL OL LI HR DIV TABLE THEAD TBODY TR "
    "TH TD BUTTON".split()
)
ATTRIBUTES = {
    "A": {"href", "title", "rel", "target"},
    "DIV": {"class", "tabindex", "role", "aria-label"},
    "PRE": {"tabindex", "role", "aria-label"},
    "BUTTON": {"type", "data-act", "aria-label"},
    "OL": {"start"},
    "TH": {"scope", "style"},
    "TD": {"style"},
}
ELEMENTS = """at => [...at.querySelectorAll("*")].map((one) =>
    [one.tagName, Object.fromEntries([...one.attributes].map((it) => [it.name, it.value]))])"""


def check_elements(elements: list[tuple[str, dict[str, str]]]) -> None:
    for name, attributes in elements:
        assert name in ALLOWED, (name, attributes)
        assert attributes.keys() <= ATTRIBUTES.get(name, set()), (name, attributes)
        if name == "A":
            assert re.match(r"(https?://|mailto:)", attributes["href"]), attributes
            assert attributes["rel"] == "noopener noreferrer" and attributes["target"] == "_blank"
        assert re.fullmatch(r"(text-align: \w+;)?", attributes.get("style", ""))


def test_hostile_markdown_stays_text(open_page: OpenPage) -> None:
    """Such text never runs, loads a resource (`open_page` sees requests), or covers the page."""
    page = open_page(expected=("ERR_FAILED",))
    recorded(page, [chunk(text) for text in "\n\n".join(HOSTILE)], {})
    send(page, "<i>mine</i> **plain**")
    expect(page.locator("#status")).to_contain_text("Answer complete")
    mine = page.locator("article.user .text")
    assert mine.inner_html() == "&lt;i&gt;mine&lt;/i&gt; **plain**"
    text = page.locator("article.assistant .text")
    elements = text.evaluate(ELEMENTS)
    assert len(elements) > 60
    check_elements(elements)
    expect(text).to_contain_text("<script>window.pwned = 1</script>")
    for source in HOSTILE:  # also each by itself: the text before may leave a block open
        page.evaluate(
            """async (source) => {
                const { Markdown } = await import("/page/markdown.js");
                const place = document.querySelector("article.assistant .text");
                place.replaceChildren();
                const prose = new Markdown(place);
                prose.add(source);
                prose.end();
            }""",
            source,
        )
        check_elements(text.evaluate(ELEMENTS))
    for anchor in page.locator("#messages [onclick], #messages [onload]").all():
        pytest.fail(anchor.inner_html())
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert page.locator("#send").count() == 1


def test_an_answer_in_pieces_is_the_whole_answer(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(FRAMES)
    draw = random.Random(7)
    texts = [TEXT, TEXT * 3, "a\n\n    code\n\nb", "\n\n".join(HOSTILE[:20])]
    texts += [
        "- a\n\n\n- b\n\n  c\n\nd\n===\n\n```\nx\n\ny",
        "# a\n\n### b\n\n# c\n\n## d\n\n#### e\n\nf",
    ]
    only_at_end = ["[x]\n\nb\n\nc\n\n[x]: https://a.example", "a\r\nb\r\n\r\n- c\r\n- d"]
    for text in (*texts, *only_at_end):
        _, whole = grown(page, [text])
        for size in (3, 17):
            cuts = sorted(draw.sample(range(len(text)), len(text) // size))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            before, after = grown(page, pieces)
            assert after == whole
            assert text in only_at_end or before == whole


def test_what_is_drawn_stays(open_page: OpenPage) -> None:
    """A long answer is parsed about as often as its last blocks change, without flicker."""
    page = open_page()
    page.evaluate(FRAMES)
    found: dict[str, Any] = page.evaluate(
        """async (paragraph) => {
            const { Markdown } = await import("/page/markdown.js");
            const { Lexer } = await import("/page/vendor/marked.esm.js");
            const lex = Lexer.prototype.lex;
            let parsed = 0;
            Lexer.prototype.lex = function (source) {
                parsed += source.length;
                return lex.call(this, source);
            };
            const place = document.createElement("div");
            document.body.append(place);
            const prose = new Markdown(place);
            let added = 0, first = null;
            const count = (list) => { for (const one of list) added += one.addedNodes.length; };
            const observer = new MutationObserver(count);
            observer.observe(place, { childList: true });
            for (let i = 0; i < 200; i++) {
                prose.add(paragraph);
                await null;
                first ??= place.firstElementChild;
            }
            const kept = first && first === place.firstElementChild;
            const streamed = parsed;
            prose.add("```\\n");
            for (let i = 0; i < 50; i++) {
                prose.add("a line of code\\n");
                await null;
            }
            count(observer.takeRecords());
            const before = added;
            const block = place.querySelector("pre code");
            for (let i = 0; i < 50; i++) {
                prose.add("a line of code\\n");
                await null;
            }
            count(observer.takeRecords());
            const inCode = added - before, same = block === place.querySelector("pre code");
            prose.end();
            count(observer.takeRecords());
            const paragraphs = place.querySelectorAll("p").length;
            place.remove();
            Lexer.prototype.lex = lex;
            const length = prose.text.length;
            return { kept, streamed, before, inCode, same, paragraphs, all: added, length };
        }""",
        "Some **words** of an answer, and `code`.\n\n",
    )
    assert found["kept"] and found["same"] and found["paragraphs"] == 200
    assert found["inCode"] == 0 and found["all"] == found["before"]
    assert found["before"] < 3 * 200
    assert 0 < found["streamed"] < 6 * 200 * 42  # of 200 * 200 / 2 * 42, were all parsed each time


PARSED = """async (text) => {
    const { Markdown } = await import("/page/markdown.js");
    const { Lexer } = await import("/page/vendor/marked.esm.js");
    const inline = Lexer.prototype.inlineTokens;
    let longest = 0;
    Lexer.prototype.inlineTokens = function (source, ...rest) {
        longest = Math.max(longest, source.length);
        return inline.call(this, source, ...rest);
    };
    const place = document.createElement("div");
    const prose = new Markdown(place);
    prose.text = text;
    prose.end();
    Lexer.prototype.inlineTokens = inline;
    let depth = 0;
    for (const node of place.querySelectorAll("*")) {
        let levels = 1;
        for (let at = node; at !== place; at = at.parentNode) levels++;
        depth = Math.max(depth, levels);
    }
    return { longest, depth, shown: place.textContent.length };
}"""


def test_hostile_text_does_not_hold_up_the_page(open_page: OpenPage) -> None:
    """Text that would cost a parser much time or depth is shown as it is."""
    page = open_page()
    for part in ("**a* ", "[", "> ", "+ ", "_a_ b", "a` ", "<a ", "*a", "![a]("):
        found: dict[str, Any] = page.evaluate(PARSED, part * (40_000 // len(part)))
        assert found["longest"] <= 8000 and found["depth"] <= 40, part
        assert found["shown"] > (39_000 if part in ("**a* ", "[", "<a ") else 10_000), part


def test_libraries_are_as_published_and_come_with_the_wheel() -> None:
    """SOURCES.txt has the version, licence and digest of each, beside the licence's text."""
    vendor = FOLDER / "vendor"
    sources = (vendor / "SOURCES.txt").read_text()
    libraries = [path for path in vendor.iterdir() if path.suffix == ".js"]
    assert libraries
    for path in libraries:
        assert f"{path.name}: " in sources
        assert hashlib.sha256(path.read_bytes()).hexdigest() in sources
        assert (vendor / f"{path.name.split('.')[0]}.LICENSE.txt").exists()
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["jaxserve.server.page"]
    packed = {path for pattern in patterns for path in FOLDER.glob(pattern)}
    there = {
        path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path for path in there - packed if path.suffix != ".py"} == set()
