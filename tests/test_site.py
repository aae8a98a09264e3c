"""The documentation as a site: what `make docs` has built, in a browser, over http."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import at_width, chromium, sideways

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "docs"
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
pytestmark = pytest.mark.skipif(
    not (SITE / "gallery.html").is_file(), reason="no site: make docs builds it"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def driver():
    with chromium() as found:
        yield found


@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_a_phone(driver, address, page):
    """No page scrolls sideways, no formula up and down, and every image is there."""
    at_width(driver, 380)
    driver.get(f"{address}/{page}.html")
    assert sideways(driver) <= 0
    up_and_down = "return [...document.querySelectorAll('math[display=block]')]"
    up_and_down += ".filter(m => m.scrollHeight > m.clientHeight).length"
    assert driver.execute_script(up_and_down) == 0
    images = "return [...document.images].filter(i => !i.naturalWidth || !i.alt).length"
    assert driver.execute_script(images) == 0
    severe = [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert severe == []


def test_the_gallery_shows_every_figure(driver, address):
    driver.get(f"{address}/gallery.html")
    shown = driver.execute_script("return [...document.images].map(i => i.src.split('/').pop())")
    files = {file.name for file in (ROOT / "docs" / "figures").glob("*.png")}
    assert set(shown) == files and len(files) >= 13


def test_search_finds_a_word(driver, address):
    from selenium.webdriver.support.ui import WebDriverWait

    at_width(driver, 1200)
    driver.get(f"{address}/index.html")
    driver.execute_script("document.querySelector('#__search').checked = true")
    field = driver.find_element("css selector", "input.md-search__input")
    field.send_keys("stacking")
    # read in one piece: the list is built anew while it is searched
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    WebDriverWait(driver, 20).until(
        lambda browser: any("glossary" in link for link in browser.execute_script(links))
    )
