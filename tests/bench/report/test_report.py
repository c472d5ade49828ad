"""The report: true words, whole and closed in itself, and readable in a real browser."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.analysis.tune import peagle_config, tune
from peagle.bench.report.answers import samples_block
from peagle.bench.report.manifest import machine
from peagle.bench.report.page import build_page, page_sections, write_plots, write_report
from peagle.bench.report.plots import all_plots
from peagle.bench.report.tables import speed_tables, what_to_run
from peagle.bench.report.trees import BONUS, ROOT, outline, trees_block
from peagle.bench.report.verdict import (
    headline,
    key_figures,
    lossless_details,
    lossless_verdict,
    sentences,
)
from peagle.bench.results.document import Agreement, Lossless, Results, from_json
from tests.browser import Browser, find_browser, started_browser

from ..made import make_cell, make_lossless, make_results, make_samples, make_tree, modelled_grid

HOSTILE = (
    '</pre><script>document.title="owned"</script>',
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg/onload=document.title="owned">',
    "\u202egnidaer sdrawkcab\u0000\ud800",
    "${title} $style &lt; &amp;",
    "javascript:document.title='owned'",
    "x" * 3000,
)


def full_results() -> Results:
    return modelled_grid(
        workloads=("chat",), loads=(1, 4), ks=(3, 5),
        samples=make_samples(), lossless=make_lossless(), trees=[make_tree()],
    )  # fmt: skip


@pytest.fixture(scope="module")
def html() -> str:
    return build_page(full_results())


@pytest.fixture
def one_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of the time and are tested elsewhere: the first stands for all."""
    module = "peagle.bench.report.page"
    monkeypatch.setattr(f"{module}.all_plots", lambda results: all_plots(results)[:1])


class Reader(HTMLParser):
    """Tags that were opened, with their attributes, and whether each was closed in turn."""

    EMPTY = ("meta", "link", "img", "br", "source")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.slow
def test_every_part_is_there(html: str) -> None:
    ids = [a["id"] for tag, a in read(html).tags if tag == "section"]
    assert ids == [
        *("verdict", "run", "table", "plots", "trees", "answers", "lossless", "loops", "manifest"),
    ]
    for words in ("Speed-up by load", "Latency tails", "Where the time goes", "SHA-256",
                  "peagle bench smollm2-135m", "0123456789abcdef", "A CPU"):  # fmt: skip
        assert words in html


def test_headings_descend_one_step_at_a_time(html: str) -> None:
    levels = [int(tag[1]) for tag, _ in read(html).tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_pictures_have_words_and_tables_have_captions(html: str) -> None:
    reader = read(html)
    pictures = [a for tag, a in reader.tags if tag == "img"]
    assert pictures
    assert all(len(a["alt"] or "") > 40 for a in pictures)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("caption") == tags.count("table") == html.count('<div class="scroll ')


def test_nothing_is_loaded_and_nothing_runs(html: str) -> None:
    for tag, attributes in read(html).tags:
        assert tag not in ("script", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "href"):
                assert (value or "").startswith(("data:", "#"))
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_a_tree_is_drawn_with_the_path_that_the_target_took() -> None:
    tree = make_tree()
    places = {place.line: place for place in outline(tree)}
    # Depth first, the target's own token ahead of the siblings that it did not take.
    assert [places[n].node for n in range(8)] == [ROOT, 1, 2, 4, BONUS, 5, 3, 6]
    assert [places[n].depth for n in range(8)] == [0, 1, 2, 2, 3, 3, 1, 2]
    assert [places[places[n].parent].node for n in range(1, 8)] == [ROOT, 1, 1, 4, 4, ROOT, 3]
    block = trees_block([tree])
    read(block)
    boxes = re.findall(r'<rect class="(\w+)".*?/><text[^>]*>([^<]*)<', block)
    assert boxes == [("taken", "\u00b7sky"), ("taken", "\u00b7is"), ("own", "\u00b7blue")]
    assert block.count('<path class="taken"') == 2
    assert block.count('class="other"') == 2 * 4  # a line and a text for each that was not taken
    assert "2 of 6 drafts accepted" in block
    assert "The target accepted \u00b7sky, \u00b7is and added \u00b7blue." in block
    refused = [replace(node, accepted=False) for node in tree.nodes]
    alone = trees_block([replace(tree, nodes=refused, bonus="", before="")])
    assert "<rect" not in alone
    assert "The target accepted none." in alone
    assert trees_block([]) == ""


def test_results_from_before_trees_were_recorded_still_open() -> None:
    document = full_results().to_json()
    del document["trees"]
    assert from_json(document, "results.json").trees == []
    assert from_json(full_results().to_json(), "results.json").trees == [make_tree()]


@pytest.mark.usefixtures("one_plot")
def test_hostile_text_stays_text() -> None:
    samples = [replace(s, question=HOSTILE[0], prompt=HOSTILE[2], workload=HOSTILE[1])
               for s in make_samples(HOSTILE)]  # fmt: skip
    trees = [
        replace(make_tree(f"p-eagle N={n}", words), prompt=HOSTILE[1], before=words[0])
        for n, words in enumerate(pairwise(HOSTILE))
    ]
    grid = modelled_grid(workloads=(HOSTILE[1],), samples=samples, lossless=make_lossless(2),
                         trees=trees)  # fmt: skip
    assert grid.lossless is not None
    bad = [replace(d, got_text=HOSTILE[0], prompt=HOSTILE[1]) for d in grid.lossless.differences]
    manifest = replace(grid.manifest, model=HOSTILE[0], settings={HOSTILE[1]: HOSTILE[0]})
    hostile = replace(grid, manifest=manifest, lossless=replace(grid.lossless, differences=bad))
    html = build_page(hostile)
    found = read(html).tags
    assert "script" not in {tag for tag, _ in found}
    assert [set(a) for tag, a in found if tag == "svg"] == [
        {"role", "aria-label", "viewbox", "width", "height"} for _ in trees
    ]
    assert "${title} $style &amp;lt; &amp;amp;" in html
    assert html.encode()  # the half character is gone
    images = [a for tag, a in read(html).tags if tag == "img"]
    assert all(set(a) == {"src", "alt"} for a in images)


def test_accepted_drafts_are_marked_and_only_they(html: str) -> None:
    answers = html.partition('id="answers"')[2].partition("</section>")[0]
    tokens = re.findall(r'<div class="tokens">(.*?)</div>', answers)
    assert tokens[0] == "The sky is blue."
    assert tokens[2] == ('The<mark class="draft"> sky is</mark> blue<mark class="draft">.</mark>')
    assert "3 of 5 tokens drafted" in answers
    style = html.partition("mark.draft {")[2].partition("}")[0]
    assert "underline" in style
    assert "background" in style


def test_answers_stand_in_order_under_short_names_without_texts_that_are_not_ours() -> None:
    plain, eagle3, p_eagle = make_samples()
    shown = samples_block([
        replace(p_eagle, method="p-eagle (mine)", question=""),
        replace(eagle3, method="eagle3 (a)", question=""),
        replace(eagle3, method="eagle3 (b)", question=""),
        replace(plain, question=""),
    ])  # fmt: skip
    names = re.findall("<h4>(.*?)</h4>", shown)
    assert names == ["none", "eagle3 (a) K=3", "eagle3 (b) K=3", "p-eagle K=5"]
    assert "blockquote" not in shown


def test_code_is_set_in_columns_and_prose_is_not() -> None:
    prose, code = make_samples(), make_samples(("def", " f", "():\n", "    return", " 1"))
    assert 'class="tokens"' in samples_block(prose)
    assert "code" not in samples_block(prose)
    assert samples_block(code).count('class="tokens code"') == 3


def test_without_a_drafter_nothing_is_shaded_whatever_a_file_says() -> None:
    plain = make_samples()[0]
    said = replace(plain, tokens=[replace(token, drafted=True) for token in plain.tokens])
    assert samples_block([said]).count("<mark") == 1, "that of the legend"


def test_answers_of_trees_stand_with_their_method_and_say_so() -> None:
    plain, _, p_eagle = make_samples()
    tree = replace(p_eagle, method="p-eagle N=15 (mine)")
    shown = samples_block([tree, plain], ", with 1 request at a time")
    assert re.findall("<h4>(.*?)</h4>", shown) == ["none", "p-eagle N=15 K=5"]
    assert "First repeat, with 1 request at a time." in shown
    auto = samples_block([replace(p_eagle, method="p-eagle auto (mine)"), plain])
    assert re.findall("<h4>(.*?)</h4>", auto) == ["none", "p-eagle auto"]


def test_trees_are_explained_where_there_are_some(html: str) -> None:
    assert "number of nodes" not in html
    tree = replace(make_cell("p-eagle", 5, (300.0, 301.0, 299.0)), num_draft_nodes=15)
    sections = page_sections(make_results([make_cell(), tree]), None)
    assert "N is the number of nodes in a tree of drafts" in "".join(sections["table"])
    assert "p-eagle N=15 K=5" in "".join(sections["table"])


def test_contents_lead_to_every_section(html: str) -> None:
    tags = read(html).tags
    links = [a["href"] for tag, a in tags if tag == "a"]
    assert links == [f"#{a['id']}" for tag, a in tags if tag == "section"]


def test_the_command_to_run_is_what_tune_advises(html: str) -> None:
    commands = re.findall(r'<pre class="command"><code>(.*?)</code>', html)
    config = peagle_config(tune(full_results()).overall.best.setting)
    words = shlex.split(unescape(commands[0]))
    assert words[:3] == ["peagle", "generate", "smollm2-135m"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == config
    slow = make_results([make_cell(), make_cell("ngram", 3, (50.0, 51.0, 49.0))])
    assert "--speculative-config" not in "".join(page_sections(slow, tune(slow))["run"])


def test_gain_and_loss_have_a_sign_and_a_colour() -> None:
    cells = [
        make_cell(speeds=(100.0, 101.0, 99.0)),
        make_cell("p-eagle", 5, (200.0, 202.0, 199.0)),
        make_cell("p-eagle", 3, (100.0, 102.0, 98.0)),
        make_cell("ngram", 3, (50.0, 51.0, 49.0)),
    ]
    shown = speed_tables(make_results(cells))
    assert '<span class="up">&#9650;&nbsp;2.00x</span>' in shown
    assert '<span class="even">&asymp;&nbsp;1.00x</span>' in shown
    assert '<span class="down">&#9660;&nbsp;0.50x</span>' in shown
    style = build_page(make_results(cells)).partition("<style>")[2]
    assert ".up { color" in style
    assert ".down { color" in style


def test_main_tables_have_intervals_or_the_range_of_two_repeats() -> None:
    three = [make_cell(), make_cell("p-eagle", 5, (150.0, 153.0, 147.0))]
    shown = text_of(speed_tables(make_results(three)) + what_to_run(tune(make_results(three))))
    assert shown.count("150 ± 9") == 2
    assert shown.count("1.50x (1.46 to 1.54)") == 2
    two = [make_cell(speeds=(79_028.0, 67_537.0)), make_cell("p-eagle", 5, (144_000.0, 145_800.0))]
    shown = text_of(speed_tables(make_results(two)))
    assert "73,000 (68,000 to 79,000)" in shown
    assert "2.0x" not in shown
    assert "1.98x (2 repeats)" in shown
    assert "±" not in shown
    assert not re.search("[▲▼≈]", shown), "neither a gain nor noise is known"


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html))


def test_the_figures_at_the_top_are_those_of_the_tables() -> None:
    results = replace(modelled_grid(), lossless=Lossless(78, 0, speculative=Agreement(54, 0)))
    peak, equal = key_figures(results, tune(results))[-2:]
    starred = re.findall(r"★ ([\d,.]+)", text_of(speed_tables(results)))
    assert peak.value == max(starred, key=lambda figure: float(figure.replace(",", "")))
    assert equal.value == "54 of 54"
    assert "all 54 greedy answers" in lossless_verdict(results.lossless, "float32")


def test_the_star_stands_where_tune_says_fastest() -> None:
    results = modelled_grid(workloads=("chat",), loads=(1, 16, 512))
    for advice, column in zip(tune(results).by_place, (1, 2, 3), strict=True):
        rows = re.findall(r"<tr>(.*?)</tr>", speed_tables(results))[1:]
        cells = [re.findall(r"<t[hd].*?</t[hd]>", row) for row in rows]
        (starred,) = [row[0] for row in cells if "&#9733;" in row[column]]
        assert text_of(starred) == advice.choices[0].name


def test_equality_is_one_sentence_with_details_behind_it() -> None:
    found = Lossless(
        300, 30, plain=Agreement(60, 10, 4, 0.05, 0.62), speculative=Agreement(240, 20, 9, 0.1, 0.6)
    )
    results = make_results([make_cell()], lossless=found)
    results = replace(results, manifest=replace(results.manifest, dtype="bfloat16"))
    (tile,) = [f for f in key_figures(results, None) if "near tie" in f.what]
    assert (tile.value, tile.what) == ("0", "of 9 differences examined go beyond a near tie")
    verdict = "\n".join(page_sections(results, None)["verdict"])
    sentence = lossless_verdict(found, "bfloat16")
    assert sentence.count(".") == 1
    assert f"<p>{sentence}</p>\n<details>" in verdict
    assert "20 of 240" not in verdict.partition("<details>")[0]


def test_a_busy_machine_is_said_where_it_was_measured() -> None:
    quiet = make_cell("p-eagle", 5, (150.0, 153.0, 147.0))
    runs = [replace(run, other_cpu_share=share) for run, share in zip(
        make_cell().repeats, (0.02, 0.41, 0.30), strict=True)]  # fmt: skip
    results = make_results([replace(make_cell(), repeats=runs), quiet])
    words = " ".join(sentences(results, tune(results)))
    assert "Busy machine: during 2 of 6 runs others took up to 41% of the CPU time." in words
    assert text_of(speed_tables(results)).count("(busy)") == 1
    assert "usy" not in " ".join(sentences(make_results([quiet]), None))


def test_hardware_and_time_are_written_for_people(html: str) -> None:
    assert "2 January 2026, 03:04 UTC" in html
    manifest = full_results().manifest
    one = {"gpus": ["NVIDIA H200, 143771 MiB"]}
    for hardware, words in ((one, "NVIDIA H200, 140 GiB"), ({"gpus": one["gpus"] * 2}, "2 x ")):
        found = replace(manifest, device="cuda", provenance={"hardware": hardware})
        assert machine(found).startswith(words)


@pytest.mark.usefixtures("one_plot")
def test_the_headline_says_what_tune_says() -> None:
    grid = modelled_grid()
    best = tune(grid).overall.best
    assert headline(tune(grid)).startswith(f"{best.name} answers {best.gain.value:.2f} times")
    slow = make_results([make_cell(), make_cell("ngram", 3, (50.0, 51.0, 49.0))])
    assert "does not pay" in headline(tune(slow))
    assert "does not pay" in build_page(slow)
    assert "is unknown" in headline(None)


def test_loads_where_speculation_loses_are_named() -> None:
    grid = modelled_grid(loads=(1, 16, 512))
    words = " ".join(sentences(grid, tune(grid)))
    assert "Speculation should be off with 512 requests at once" in words
    assert "The gain is largest with 1 request at a time" in words


def test_the_losslessness_verdict_depends_on_the_gaps() -> None:
    assert "all 240 greedy answers equal" in lossless_verdict(make_lossless(), "float32")
    near = lossless_verdict(make_lossless(3, gap=1e-4), "float32")
    assert "nearly tied" in near
    assert "3 of 240" in " ".join(lossless_details(make_lossless(3, gap=1e-4), "float32"))
    assert "Look into it" in lossless_verdict(make_lossless(3, gap=0.1), "float32")
    assert "nearly tied" in lossless_verdict(make_lossless(3, gap=0.1), "bfloat16")
    assert "Look into it" in lossless_verdict(make_lossless(1, gap=-2.0), "bfloat16")
    assert "not known" in lossless_verdict(make_lossless(1, gap=None), "float32")
    assert "not checked" in lossless_verdict(None, "float32")


def test_differences_without_speculation_are_told_apart_from_those_with_it() -> None:
    found = Lossless(
        300, 30, plain=Agreement(60, 10, 4, 0.05, 0.62), speculative=Agreement(240, 20, 9, 0.1, 0.6)
    )
    assert "as plain answers do between loads" in lossless_verdict(found, "bfloat16")
    words = " ".join(lossless_details(found, "bfloat16"))
    assert "With speculation 20 of 240 greedy answers differ from plain decoding's" in words
    assert "9 places that were examined" in words
    assert "at most 0.6 apart" in words
    assert "Without speculation 10 of 60 greedy answers differ" in words
    same = replace(found, plain=Agreement(60, 0))
    assert "all 60 are the same" in " ".join(lossless_details(same, "bfloat16"))
    assert "as plain answers do" not in lossless_verdict(same, "bfloat16")
    wrong = replace(found, speculative=Agreement(240, 20, 9, 0.1, 3.0))
    assert "more than rounding in bfloat16 usually explains" in lossless_verdict(wrong, "bfloat16")


@pytest.mark.usefixtures("one_plot")
def test_partial_results_are_marked(html: str) -> None:
    assert 'class="partial"' not in html
    broken = make_cell("p-eagle", 5, (150.0,), partial=True)
    for partial, words in ((True, "unfinished"), (False, "cut short")):
        found = build_page(make_results([make_cell(), broken], partial=partial))
        assert 'class="partial"' in found
        assert words in found
        assert "the endpoint went away" in found
        assert "150 (partial)" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "results",
    [
        make_results([]),
        make_results([make_cell("mine", 0)]),
        make_results([make_cell("p-eagle", 5, [0.0])]),
        make_results([replace(make_cell(), repeats=[])], partial=True),
        make_results([make_cell(), make_cell("p-eagle", 5, [10.0])]),
    ],
    ids=["empty", "endpoint", "no tokens", "no repeats", "one repeat"],
)
def test_little_is_enough_for_a_page(results: Results) -> None:
    html = build_page(results)
    assert "Verdict" in html
    read(html)


@pytest.mark.usefixtures("one_plot")
def test_the_file_is_written_whole_and_twice_the_same(tmp_path: Path) -> None:
    write_report(full_results(), tmp_path / "a" / "report.html")
    write_report(full_results(), tmp_path / "b.html")
    assert (tmp_path / "a" / "report.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    plots = write_plots(full_results(), tmp_path)
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert (tmp_path / "speed_up.png") in plots


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium or Chrome on this machine")
    with started_browser(program) as started:
        yield started


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large grid, with answers that would rather be code."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    results = modelled_grid(
        loads=(1, 2, 4, 8, 16, 32, 64, 128),
        samples=make_samples(HOSTILE),
        lossless=make_lossless(3),
        trees=[make_tree(f"p-eagle N={n}", words) for n, words in enumerate(pairwise(HOSTILE))],
        partial=True,
    )
    write_report(results, path)
    return path


SIZE = "[document.documentElement.scrollWidth, innerWidth]"
PICTURES = "[...document.images].map(i => i.complete && i.naturalWidth > 0)"
TREES = """[...document.querySelectorAll('.tree svg')].map(s => [s.getBoundingClientRect().right,
  s.viewBox.baseVal.width, s.getBoundingClientRect().width])"""
# Text that sticks out of its own box, in boxes that do not scroll.
OVERFLOWING = """[...document.querySelectorAll('p, li, h1, h2, h3, h4, dd, .tokens, blockquote')]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 40))"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_overflow_errors_or_requests(
    browser: Browser, hostile_page: Path, width: int, tmp_path: Path
) -> None:
    browser.open(hostile_page, width=width)
    scroll_width, inner_width = browser.evaluate(SIZE)
    assert inner_width == width
    assert scroll_width <= width
    assert browser.evaluate(OVERFLOWING) == []
    shown = browser.evaluate(PICTURES)
    assert len(shown) >= 6
    assert all(shown)
    assert browser.complaints() == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requested())
    assert browser.evaluate("document.title") != "owned"
    assert browser.evaluate("document.querySelectorAll('mark.draft').length") > 1
    sizes = browser.evaluate(TREES)
    assert len(sizes) == len(HOSTILE) - 1
    # Inside the column, and no smaller than half of what was drawn.
    assert all(right <= width and drawn <= 2 * shown for right, drawn, shown in sizes)
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


# Cells of the main tables that do not stand whole on the screen.
CUT = """[...document.querySelectorAll('.grid td')].filter(e => e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth || e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent.slice(0, 40))"""


@pytest.mark.slow
def test_a_phone_shows_every_load_without_scrolling(browser: Browser, hostile_page: Path) -> None:
    browser.open(hostile_page, width=390)
    assert browser.evaluate("document.querySelectorAll('.grid td').length") > 8 * 13
    assert browser.evaluate(CUT) == []


COLOURS = """[getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.body).color, getComputedStyle(document.images[0]).filter]"""


@pytest.mark.slow
def test_a_dark_page_has_light_letters_and_plots_to_match(
    browser: Browser, hostile_page: Path
) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        browser.open(hostile_page, width=1280)
        seen[scheme] = browser.evaluate(COLOURS)
    browser.call("Emulation.setEmulatedMedia", features=[])
    page, ink, plots = zip(*seen.values(), strict=True)
    brightness = [[int(n) for n in re.findall(r"\d+", colour)[:3]] for colour in (*page, *ink)]
    light_page, dark_page, dark_ink, light_ink = map(sum, brightness)
    assert min(light_page, light_ink) > 650
    assert max(dark_page, dark_ink) < 120
    assert plots[0] == "none"
    assert "invert" in plots[1]


@pytest.mark.slow
def test_a_phone_gets_the_narrow_pictures(browser: Browser, hostile_page: Path) -> None:
    ratios = {}
    for width in (390, 1280):
        browser.open(hostile_page, width=width)
        ratios[width] = browser.evaluate(
            "document.images[0].naturalHeight / document.images[0].naturalWidth"
        )
    assert ratios[390] > 1 > ratios[1280]


@pytest.mark.slow
def test_the_browser_test_can_fail(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<meta name="viewport" content="width=device-width"><p style="width:2000px">wide</p>'
        '<script>console.error("x"); document.title = "owned"</script>'
        '<img src="http://127.0.0.1:9/x.png">'
    )
    browser.open(bad, width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert browser.complaints()
    assert browser.evaluate("document.title") == "owned"
    assert any(url.startswith("http:") for url in browser.requested())
