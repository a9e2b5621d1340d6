"""How long the very first view of each page takes once the server is up.

    python -m benchmarks.first_view [--artifacts DIR]

For every page a new server process and a new browser session, so that nothing is cached; measured from the request
to the moment when the app has run and its plots are drawn. The demo's bound is 3 s on two cores. The last line is JSON.
"""

import argparse
import json
import os
import time
from pathlib import Path

from tests.browser.driver import DEMO_ARTIFACTS, chromium, dashboard_server, settle

PAGES = {"overview": "", "router": "router", "banks": "banks", "collapse": "collapse", "live": "live"}
LIMIT_S = 3.0


def measure(artifacts: Path) -> dict[str, float]:
    """Seconds of the first view, by page."""
    seconds = {}
    with chromium() as browser:
        browser.new_page().close()  # the browser's own start is not the dashboard's
        for name, path in PAGES.items():
            with dashboard_server(artifacts) as url:
                page = browser.new_page()
                start = time.perf_counter()
                page.goto(f"{url}/{path}")
                page.locator("h1").wait_for()
                settle(page)
                if page.locator("[data-testid=stPlotlyChart]").count():
                    page.locator(".js-plotly-plot .main-svg").first.wait_for()
                seconds[name] = round(time.perf_counter() - start, 2)
                page.close()
    return seconds


def main() -> None:
    """Prints the measurement as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifacts", type=Path, default=DEMO_ARTIFACTS)
    args = parser.parse_args()
    seconds = measure(args.artifacts)
    result = {
        "name": "first_view",
        "ratios": {f"{page}_to_limit": round(value / LIMIT_S, 3) for page, value in seconds.items()},
        "detail": {"seconds": seconds, "limit_s": LIMIT_S, "cores": os.cpu_count()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
