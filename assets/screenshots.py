"""Makes the README's screenshots: `python -m assets.screenshots` (or `make screenshots`).

Starts the dashboard on the demo artifacts and drives it in headless Chromium.
"""

from pathlib import Path

from tests.browser.driver import DEMO_ARTIFACTS, chromium, dashboard_server, open_page

FOLDER = Path(__file__).parent / "screenshots"
WIDTH, HEIGHT = 1440, 900
TALL = {"live": 1180}  # pages whose evidence stands below
DRAW_MS = 1500  # plotly's own animation after the app has settled

VIEWS = {
    "overview": "",
    "router": "router?layer=5&bank=2",
    "banks": "banks",
    "collapse": "collapse",
    "live": "live?off=0&prompt=The%20three%20sisters%20walked%20to%20the",
}


def main() -> None:
    """Writes one PNG a page."""
    FOLDER.mkdir(exist_ok=True)
    with dashboard_server(DEMO_ARTIFACTS) as url, chromium() as browser:
        for name, path in VIEWS.items():
            page = open_page(browser, f"{url}/{path}", WIDTH, TALL.get(name, HEIGHT))
            page.wait_for_timeout(DRAW_MS)
            page.screenshot(path=FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
