"""The page map of a running service in headless Chromium."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from pagedkv.client import Client
from tests.monitoring.conftest import MixedLoad, keys_and_values, need

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    need("chromium", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def complaints(browser):
    """What the console holds, but for advice about this test's own reading of pixels."""
    return [entry for entry in browser.get_log("browser") if entry["source"] != "rendering"]


class Page:
    def __init__(self, browser, url):
        self.browser, self.url = browser, url

    def open(self, width=1440, height=1000, theme="light"):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.browser.get(self.url)
        self.wait("return document.getElementById('status-text').textContent === 'live'", "live stream")
        self.wait("return document.querySelectorAll('.policy').length === 4 && !!pagemap.figures()", "figures")
        return self

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, script, what, *arguments, seconds=60):
        until = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < until, f"no {what}"
            time.sleep(0.05)
        return found

    def pixel(self, block):
        """Return red, green and blue of a block's cell, beside whatever sign is in its middle."""
        return self.run(
            "const c = document.getElementById('map'), s = pagemap.cell(), n = Math.round(c.width / s);"
            "return [...c.getContext('2d').getImageData((arguments[0] % n + .2) * s,"
            " (Math.floor(arguments[0] / n) + .2) * s, 1, 1).data].slice(0, 3)",
            block,
        )

    def choose(self, sequence_id):
        """Click a sequence in the list, as soon as it is there."""
        button = "[...document.querySelectorAll('#sequences button')].find(b => b.title === arguments[0])"
        self.wait(f"const found = {button}; found?.click(); return found", "sequence in the list", sequence_id)

    def settle(self):
        """Wait until the map is drawn and nothing flashes in it any more."""
        self.wait("return pagemap.settled()", "quiet map")

    def colour_of(self, selector):
        text = self.run("return getComputedStyle(document.querySelector(arguments[0])).backgroundColor", selector)
        return [int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)


def contrast(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def page(browser, service):
    page = Page(browser, service.metrics_url + "/").open()
    yield page
    assert complaints(browser) == []


@pytest.fixture
def client(service):
    with Client(service.address) as client:
        yield client


@pytest.fixture
def held(client):
    """A sequence of 40 tokens, 3 blocks, and its fork."""
    client.allocate("held")
    client.append("held", *keys_and_values(40))
    client.fork("held", "held/fork")
    yield "held"
    for name in ("held", "held/fork"):
        if name in {sequence.sequence_id for sequence in client.sequences()}:
            client.free(name)


def test_page_loads_describes_the_pool_and_fetches_nothing_from_elsewhere(page):
    assert page.text("#pool").startswith("160 blocks of 16 tokens")
    origins = page.run("return performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin)")
    assert set(origins) <= {page.url.rstrip("/")}
    assert page.run("return pagemap.state(0)") in ("free", "cached")


def test_page_updates_while_tokens_stream(page, client):
    def generate():
        for _ in client.generate(token_ids=[9] * 30, max_tokens=1200, temperature=0.0, ignore_eos=True):
            pass

    before = page.run("return pagemap.figures().generated_tokens")
    thread = threading.Thread(target=generate)
    thread.start()
    try:
        seen, blocks = set(), set()
        until = time.monotonic() + 60
        while len(seen) < 4 and time.monotonic() < until:
            tokens = page.run("return pagemap.sequences().filter(id => id.startsWith('~gen')).map(pagemap.tokens)")
            if tokens:
                seen.add(tokens[0])
                blocks.add(page.run("return pagemap.figures().blocks.private"))
            time.sleep(0.05)
    finally:
        thread.join()
    assert len(seen) >= 4
    assert len(blocks) >= 2
    page.wait("return pagemap.figures().generated_tokens === arguments[0]", "last token", before + 1200)
    page.wait("return pagemap.sequences().length === 0", "end of the sequence")


def test_swapped_sequence_says_so_and_holds_no_block_of_the_map(page, client, held):
    page.wait("return pagemap.table('held').length === 3", "sequence")
    client.swap_out([held, "held/fork"])
    page.wait("return pagemap.table('held').length === 0 && pagemap.tokens('held') === 40", "swap")
    listed = "return [...document.querySelectorAll('#sequences li')].map(item => item.textContent).join()"
    page.wait(f"{listed}.includes('swapped out')", "note")
    page.wait("return document.getElementById('host').textContent.includes('3 of 160 blocks')", "host blocks")
    client.swap_in([held, "held/fork"])
    page.wait("return pagemap.table('held').length === 3", "return")
    assert page.run("return pagemap.table('held').map(pagemap.state)") == ["shared"] * 3


def test_forked_block_shows_as_shared_and_a_freed_one_as_free(page, client, held):
    page.wait("return pagemap.table('held/fork').length === 3", "fork")
    table = page.run("return pagemap.table('held')")
    assert page.run("return pagemap.table('held/fork')") == table
    assert [page.run("return pagemap.state(arguments[0])", block) for block in table] == ["shared"] * 3
    assert page.run("return pagemap.holders(arguments[0])", table[0]) == ["held", "held/fork"]
    client.free("held/fork")
    page.wait("return pagemap.state(arguments[0]) === 'private'", "private block", table[0])
    client.free("held")
    page.wait("return pagemap.state(arguments[0]) === 'free'", "free block", table[0])


def test_choosing_a_sequence_shows_its_table_and_its_end(page, client, held):
    page.wait("return [...document.querySelectorAll('#sequences button')].length === 2", "list")
    page.run("[...document.querySelectorAll('#sequences button')].find(b => b.textContent.includes('fork')).click()")
    assert page.text("#detail-title") == "held/fork"
    physical = page.run("return [...document.querySelectorAll('#table li')].map(item => +item.dataset.physical)")
    assert physical == page.run("return pagemap.table('held/fork')")
    client.free("held/fork")
    page.wait("return document.getElementById('detail-note').textContent.includes('has ended')", "note of the end")


def test_filter_lists_matching_sequences_only_and_dims_the_rest(page, client, held):
    page.wait("return document.querySelectorAll('#sequences button').length === 2", "list")
    block = page.run("return pagemap.table('held')[0]")
    page.settle()
    plain = page.pixel(block)
    field = page.browser.find_element("id", "filter")
    field.send_keys("FORK")
    page.wait("return document.querySelectorAll('#sequences button').length === 1", "shorter list")
    assert page.text("#sequence-count") == "1 of 2"
    field.clear()
    field.send_keys("nobody")
    page.wait("return document.querySelectorAll('#sequences button').length === 0", "empty list")
    page.settle()
    assert page.pixel(block) != plain


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_free_cells_stay_visible_beside_a_chosen_sequence(browser, service, client, held, theme):
    client.allocate("spare")
    client.append("spare", *keys_and_values(40))
    block = client.sequence("spare").block_table[0]
    client.free("spare")
    page = Page(browser, service.metrics_url + "/").open(theme=theme)
    page.choose("held")
    page.settle()
    assert page.run("return pagemap.state(arguments[0])", block) == "free"
    assert contrast(page.pixel(block), page.colour_of("#viewport")) >= 24
    chosen = page.run("return pagemap.table('held')[0]")
    assert contrast(page.pixel(chosen), page.pixel(block)) >= 150


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_mark_of_a_chosen_sequence_is_seen_in_the_list(browser, service, held, theme):
    """Whatever colour the sequence has: one of them is nearly that of the chosen row."""
    page = Page(browser, service.metrics_url + "/").open(theme=theme)
    page.choose("held")
    mark = "#sequences button[aria-pressed=true] .swatch"
    page.wait("return document.querySelector(arguments[0])", "chosen row", mark)
    ring = page.run("return getComputedStyle(document.querySelector(arguments[0])).outlineColor", mark)
    ring = [int(part) for part in ring[ring.index("(") + 1 : -1].split(",")[:3]]
    assert page.run("return getComputedStyle(document.querySelector(arguments[0])).outlineStyle", mark) == "solid"
    assert contrast(ring, page.colour_of("#sequences button[aria-pressed=true]")) >= 150


def test_map_is_walked_by_keyboard_and_says_what_is_there(page, client, held):
    page.wait("return pagemap.table('held').length === 3", "sequence")
    block = page.run("return pagemap.table('held')[1]")
    canvas = page.browser.find_element("id", "map")
    page.run("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.HOME)
    for _ in range(block):
        canvas.send_keys(Keys.ARROW_RIGHT)
    page.wait("return document.getElementById('spoken').textContent.includes('ref count 2')", "spoken block")
    assert f"Block {block}" in page.text("#tip")
    canvas.send_keys(Keys.ENTER)
    assert page.text("#detail-title") == "held"
    canvas.send_keys(Keys.ESCAPE)
    assert page.run("return document.getElementById('detail').hidden")


def test_hover_shows_sequences_ref_count_and_age(page, client, held):
    page.wait("return pagemap.table('held').length === 3", "sequence")
    script = (
        "const c = document.getElementById('map'), b = c.getBoundingClientRect(), s = pagemap.cell(),"
        " n = pagemap.table('held')[0], k = Math.round(c.clientWidth / s);"
        "c.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: b.left + (n % k + .5) * s,"
        " clientY: b.top + (Math.floor(n / k) + .5) * s}))"
    )
    page.run(script)
    page.wait("return document.getElementById('tip').textContent.includes('held for')", "age")
    tip = page.text("#tip")
    assert "ref count 2" in tip
    assert "held/fork · logical 0" in tip


def test_pause_stops_and_goes_on(page, client):
    page.click("#pause")
    assert page.text("#status-text") == "paused"
    page.click("#pause")
    page.wait("return document.getElementById('status-text').textContent === 'live'", "live stream")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 1800), (1440, 1000)])
def test_page_fits_its_width_in_both_themes(browser, service, held, width, height, theme):
    page = Page(browser, service.metrics_url + "/").open(width, height, theme)
    with MixedLoad(service.address):
        time.sleep(1.5)
        if width > 1000:
            page.choose("held")
        ARTIFACTS.mkdir(exist_ok=True)
        page.browser.save_screenshot(str(ARTIFACTS / f"page-map-{width}-{theme}.png"))
        assert page.run("return document.documentElement.scrollWidth") <= width
        background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 300) == (theme == "dark")
    assert complaints(browser) == []
