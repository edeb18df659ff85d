"""The page in a real Chromium, as a file and from a server: picking, filters, search, keys, dark mode, a phone, contrast."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from mla_serve.pages import render_page
from tests.pages.sample import EVIL, decisions
from tests.server.conftest import Server

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES = {"desk": (1280, 900), "phone": (360, 740)}
Open = Callable[..., Page]

# Every visible text that is painted over one colour, with the contrast that WCAG 2 computes. What lies over a pattern is judged
# against the pattern's first colour.
CONTRAST = """() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const style = getComputedStyle(e);
      const first = style.backgroundImage.match(/rgba?\\([^)]*\\)/);
      if (first) return parse(first[0]);
      const c = parse(style.backgroundColor);
      if (c[3] === 1) return c;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e.checkVisibility() || e.closest(".hidden, .skip, script, option, .dim")) continue;
    const style = getComputedStyle(e);
    const a = light(parse(e.closest("svg") ? style.fill : style.color)), b = light(behind(e));
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim().slice(0, 40), String(e.className)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert path is not None, "these tests drive chromium: run `make browser`, or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_page(decisions()[:3], decisions(), subject="a model"), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser: Browser, file: str) -> Iterator[Open]:
    """Opens the page; at the end nothing may have been said on the console, nor asked of anybody else."""
    contexts, said, asked = [], [], []

    def open_page(url: str = file, size: str = "desk", scheme: str = "light", **options: Any) -> Page:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    pages = [url for url in asked if not url.startswith("data:")]
    assert len(pages) == len(contexts), pages


def picked(page: Page) -> str:
    """The id of the one bucket that is shown."""
    shown = page.locator(".detail:visible")
    expect(shown).to_have_count(1)
    return str(shown.get_attribute("id"))


def test_a_bucket_is_picked_by_cell_row_and_link(visit: Open, file: str) -> None:
    page = visit()
    assert picked(page) == "b0"
    page.locator("a.cell[data-id=b6]").click()
    assert picked(page) == "b6"
    assert page.url.endswith("#b6")
    detail = page.locator("#b6")
    expect(detail.locator("rect.bar")).to_have_count(2)
    expect(detail.locator("line.floor")).to_have_count(1)
    expect(detail).to_contain_text("118x faster than native torch-math")
    expect(page.locator("a.cell[aria-current=true]")).to_have_attribute("data-id", "b6")
    page.locator(".buckets tr[data-id=b3] td").first.click()
    assert picked(page) == "b3"
    assert picked(visit(f"{file}#b9")) == "b9"
    expect(visit(f"{file}#nobody").locator("#b0")).to_be_visible()


def test_filters_and_search(visit: Open) -> None:
    page = visit()
    rows, count = page.locator(".buckets tbody tr:visible"), page.locator("#count")
    expect(count).to_have_text("12 buckets")
    page.get_by_label("Phase", exact=True).select_option("decode")
    expect(rows).to_have_count(5)
    expect(count).to_have_text("5 of 12 buckets")
    expect(page.locator("a.cell:not(.dim)")).to_have_count(5)
    page.get_by_label("Decided", exact=True).select_option("by class")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Clear").first.click()
    expect(rows).to_have_count(12)
    page.get_by_label("Form", exact=True).select_option("padded")
    expect(rows).to_have_count(6)
    page.get_by_label("Form", exact=True).press("Escape")
    expect(rows).to_have_count(12)
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("refuses TORCH-flash 2048")
    expect(rows).to_have_count(1)
    page.get_by_label("Search", exact=True).fill("no such thing")
    expect(page.get_by_text("No bucket matches.")).to_be_visible()
    page.locator("#clear").click()
    expect(rows).to_have_count(12)
    page.get_by_label("Kernel", exact=True).select_option(EVIL)
    expect(rows).to_have_count(1)


def test_colour_by_the_other_form(visit: Open) -> None:
    page = visit()
    cell = page.locator("a.cell[data-id=b5]")
    before = cell.evaluate("e => getComputedStyle(e).backgroundColor")
    assert cell.inner_text().split()[0] == "1.3×"
    page.get_by_text("over the other form").click()
    assert cell.inner_text().split()[0] == "33×"
    assert cell.evaluate("e => getComputedStyle(e).backgroundColor") != before


def test_all_by_keyboard(visit: Open) -> None:
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    first = page.locator("a.cell").first
    for _ in range(20):
        page.keyboard.press("Tab")
        if first.evaluate("e => e === document.activeElement"):
            break
    expect(first).to_be_focused()
    assert first.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert picked(page) == page.evaluate("document.activeElement.dataset.id") != "b0"
    page.keyboard.press("ArrowLeft")
    expect(first).to_be_focused()


def test_without_scripts(visit: Open, file: str) -> None:
    page = visit(java_script_enabled=False)
    expect(page.locator(".buckets tbody tr:visible")).to_have_count(12)
    expect(page.locator(".filters")).to_be_hidden()
    assert picked(page) == "b0"
    page.locator("a.cell[data-id=b4]").click()
    assert picked(page) == "b4"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(visit: Open, size: str, scheme: str) -> None:
    page = visit(size=size, scheme=scheme)
    for bucket in ("b0", "b6", "b9", "b10"):
        page.locator(f"a.cell[data-id={bucket}]").click()
        found = page.evaluate(CONTRAST)
        assert len(found) > 100
        assert found[0][0] >= 4.5, found[:5]


def test_dark_mode_is_dark(visit: Open) -> None:
    light, dark = (
        [
            int(n)
            for n in re.findall(r"\d+", visit(scheme=s).evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        ]
        for s in ("light", "dark")
    )
    assert min(light) > 230
    assert max(dark) < 40


def test_a_phone_scrolls_one_way_only(visit: Open) -> None:
    page = visit(size="phone")
    for bucket in (f"b{i}" for i in range(12)):
        page.locator(f"a.cell[data-id={bucket}]").click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        expect(page.locator(f"#{bucket}")).to_be_in_viewport()
    cell = page.locator("a.cell").first.bounding_box()
    assert cell is not None
    assert cell["height"] >= 44


def test_names_that_are_html_stay_text(visit: Open, file: str) -> None:
    page = visit()
    row = page.locator(".buckets tr", has_text="<script>")
    row.click()
    assert page.title() == "Attention kernels: a model"
    expect(page.locator(".detail:visible h2")).to_contain_text(EVIL)
    assert page.locator("img").count() == 0


def test_from_the_server(visit: Open, server: Server) -> None:
    page = visit(f"{server.url}/attention")
    page.locator("a.cell").last.click()
    expect(page.locator(".detail:visible .why")).to_contain_text("serves")
    expect(page.locator("footer")).to_contain_text("as JSON")
