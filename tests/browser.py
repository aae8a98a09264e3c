"""A real browser for tests: Debian's Chromium, without a window and without the network."""

import shutil
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def chromium():
    """A driver of Chromium; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    with TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        found = webdriver.Chrome(options=options, service=service)
        try:
            yield found
        finally:
            found.quit()


def at_width(driver, width, height=900):
    """Show pages as on a screen of this width."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def sideways(driver):
    """By how many pixels the page is wider than the screen."""
    return driver.execute_script(
        "const e = document.documentElement;"
        "return Math.max(e.scrollWidth, document.body.scrollWidth) - e.clientWidth"
    )
