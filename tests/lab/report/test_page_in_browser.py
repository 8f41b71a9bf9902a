"""The page in a real browser, opened from a file, without a network: Debian's Chromium, headless.

``pytest tests/lab/report --screenshots docs/images`` also takes the documents' pictures, of the demo's page.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_pages import made_up_run, several

from protoseam.lab.report.page import page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
Actions = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
Wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
Select = pytest.importorskip("selenium.webdriver.support.select").Select
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: apt install chromium chromium-driver)",
)
DEMO = Path(__file__).parents[3] / "docs" / "reports" / "digits-demo.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--disable-gpu",
    ):
        options.add_argument(word)
    options.add_argument(
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost"
    )  # no other machine has a name
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "plane": page([made_up_run()]),
        "wide": page([made_up_run(classes=31, dim=8, images=620)]),
        "several": page(several()),
        "many": page([made_up_run(classes=9000, dim=8, images=9000, epochs=1)]),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def look_at(browser: Any, path: Path, width: int = 1200, *, dark: bool = False) -> None:
    """Open a page in a window of that width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of the page before
    browser.get(path.resolve().as_uri())


def pixels(browser: Any) -> str:
    return str(browser.execute_script("return document.getElementById('latent-view').toDataURL()"))


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


@pytest.mark.parametrize("name", ["plane", "wide", "several"])
def test_a_page_asks_for_nothing_and_has_no_errors(browser: Any, pages: dict[str, Path], name: str) -> None:
    look_at(browser, pages[name])
    assert requests(browser) == [pages[name].as_uri()]
    assert browser.get_log("browser") == []
    assert browser.find_element(By.CSS_SELECTOR, "main svg path").is_displayed()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["plane", "wide", "several"])
def test_the_page_is_accessible(browser: Any, pages: dict[str, Path], name: str, dark: bool) -> None:
    axe = pytest.importorskip("axe_selenium_python").Axe(browser)
    look_at(browser, pages[name], dark=dark)
    axe.inject()
    found = axe.run()["violations"]
    assert not found, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in found]


def test_the_confusion_of_thousands_of_classes_is_drawn(browser: Any, pages: dict[str, Path]) -> None:
    look_at(browser, pages["many"])
    drawn = "const c = document.querySelector('#confusion canvas'); return c.getContext('2d')"
    count = ".getImageData(0, 0, c.width, 1000).data.some((v) => v > 0)"
    assert browser.execute_script(drawn + count) is True


def test_the_slider_moves_the_points_and_play_goes_through_the_epochs(
    browser: Any, pages: dict[str, Path]
) -> None:
    look_at(browser, pages["plane"])
    shown, slider = browser.find_element(By.ID, "epoch-shown"), browser.find_element(By.ID, "epoch")
    last = pixels(browser)
    assert shown.text == "epoch 12"
    slider.send_keys(Keys.HOME)
    assert shown.text == "epoch 1"
    first = pixels(browser)
    assert first != last
    slider.send_keys(Keys.ARROW_RIGHT)
    assert pixels(browser) not in (first, last)
    browser.find_element(By.ID, "play").click()
    Wait(browser, 30).until(lambda _: shown.text not in ("epoch 1", "epoch 2"))
    browser.find_element(By.ID, "play").click()
    slider.send_keys(Keys.END)
    assert pixels(browser) == last


def test_pointing_at_a_point_names_its_image(browser: Any, pages: dict[str, Path]) -> None:
    look_at(browser, pages["plane"])
    canvas = browser.find_element(By.ID, "latent-view")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    card, size = browser.find_element(By.ID, "point"), canvas.size["width"]
    before = card.text
    for step in range(-4, 5):  # somewhere on a line through the middle lies a cluster
        Actions(browser).move_to_element_with_offset(
            canvas, int(step * size / 10), int(step * size / 14)
        ).perform()
        if card.text != before:
            break
    assert "test image" in card.text
    assert "Answer: " in card.text
    assert card.find_element(By.CLASS_NAME, "thumb").is_displayed()
    canvas.send_keys(Keys.ARROW_RIGHT)  # and so does the keyboard
    one = card.text
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "test image" in one
    assert card.text != one


def test_planes_and_classes_can_be_chosen(browser: Any, pages: dict[str, Path]) -> None:
    look_at(browser, pages["wide"])
    seen = {pixels(browser)}
    plane = Select(browser.find_element(By.ID, "plane"))
    assert len(plane.options) > 5
    plane.select_by_index(3)
    seen.add(pixels(browser))
    Select(browser.find_element(By.ID, "only")).select_by_visible_text("class 2")
    seen.add(pixels(browser))
    browser.find_element(By.ID, "wrong").click()
    seen.add(pixels(browser))
    browser.find_element(By.ID, "theme").click()
    seen.add(pixels(browser))
    assert len(seen) == 5


def test_a_cell_of_the_confusion_matrix_opens_its_images(browser: Any, pages: dict[str, Path]) -> None:
    look_at(browser, pages["plane"])
    panel = browser.find_element(By.ID, "cell")
    cell = browser.find_element(By.CSS_SELECTOR, ".matrix tbody tr:nth-child(3) td:nth-of-type(3) button")
    cell.click()
    assert "class 2, answered right" in panel.text
    assert len(panel.find_elements(By.CLASS_NAME, "thumb")) > 0
    assert cell.get_attribute("aria-pressed") == "true"
    look_at(browser, pages["wide"])
    panel = browser.find_element(By.ID, "cell")
    before = panel.text
    browser.find_element(By.CSS_SELECTOR, "#confusion canvas").click()  # its middle: class 15 by 15
    assert panel.text != before
    assert "class 15, answered right" in panel.text


@pytest.mark.parametrize("name", ["plane", "wide", "several"])
def test_a_phone_needs_no_scrolling_sideways(browser: Any, pages: dict[str, Path], name: str) -> None:
    look_at(browser, pages[name], width=390)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= 390
    assert browser.get_log("browser") == []
    if name != "several":
        assert browser.find_element(By.ID, "latent-view").size["width"] > 300


def test_pictures_for_the_documents(browser: Any, request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--screenshots")
    if folder is None:
        pytest.skip("no --screenshots DIR")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, section, width, dark in (
        ("report-latent", "latent", 1100, False),
        ("report-latent-dark", "latent", 1100, True),
        ("report-mistakes", "mistakes", 1100, False),
        ("report-phone", "latent", 390, False),
    ):
        look_at(browser, DEMO, width, dark=dark)
        box = browser.execute_script(
            "const r = document.getElementById(arguments[0]).getBoundingClientRect();"
            "return [r.top + scrollY, r.height]",
            section,
        )
        clip = {"x": 0, "y": box[0], "width": width, "height": box[1] + 24, "scale": 1}
        shot = browser.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        data = base64.b64decode(shot["data"])
        assert data.startswith(b"\x89PNG")
        _saved_small(data, Path(folder) / f"{name}.png")


def _saved_small(data: bytes, path: Path) -> None:
    """With 128 colours: a quarter of the bytes."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
