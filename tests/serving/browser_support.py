"""A server in this process, and a headless Chromium that visits it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from outpace.serving.app import build_app
from outpace.serving.server import open_socket, url
from outpace.serving.service import Service

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install 'selenium>=4.20'")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120
"""An upper bound for what the page does; none of it is timed."""


@contextmanager
def listening(served: Service) -> Iterator[str]:
    """The address of a server of ``served``."""
    socket = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(served), log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    try:
        yield url(socket, "127.0.0.1")
    finally:
        served.stop()
        server.force_exit = server.should_exit = True
        thread.join()
        socket.close()


class Page:
    """The page as a user sees it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, where: str) -> None:
        self.driver.get(where)

    def close(self) -> None:
        """Forget what the tab keeps."""
        if self.driver.current_url.startswith("http"):
            self.driver.execute_script("sessionStorage.clear()")
        self.driver.get("about:blank")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def content(self, selector: str) -> str:
        return str(self.one(selector).get_attribute("textContent"))

    def style(self, element: Any, name: str) -> str:
        return str(element.value_of_css_property(name))

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def until(self, true: Callable[[], Any]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: true())

    def send(self, text: str) -> None:
        """Send a message and wait until the answer has ended."""
        self.until(lambda: self.one("#method option"))
        self.fill("#message", text)
        self.one("#send").click()
        self.until(lambda: self.one("#send").is_displayed())

    def problems(self) -> list[str]:
        """Errors of scripts, and what the page's policy has forbidden; answers with a status of 4xx are neither."""
        found = [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]
        return [one for one in found if "responded with a status of 4" not in one]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """Chromium, without a window."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip("no Chromium is installed (Debian: apt install chromium chromium-driver)")
    driver_path = shutil.which("chromedriver")
    if driver_path is None:
        pytest.skip("no chromedriver is installed (Debian: apt install chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for one in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(driver_path))
    try:
        yield Page(driver)
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A fresh page at desktop size; a test that uses it must leave no problem in the console."""
    browser.resize(1280, 900)
    yield browser
    found = browser.problems()
    browser.close()
    assert not found
