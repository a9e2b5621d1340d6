"""How long a switch on the Live page takes until the browser has drawn its effect.

    python -m benchmarks.live_switch [--artifacts DIR] [--switches 30]

Measured inside headless Chromium, from the click on a switch to the last change of the page before it is quiet:
request, forward, tables and figures included. The demo's bound is 250 ms (median of 30, two cores). A cell is a
different one each time, so that no forward comes from the cache. The last line is JSON.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from tests.browser.driver import DEMO_ARTIFACTS, chromium, dashboard_server, open_page

QUIET_MS = 400  # a page that has not changed for so long is drawn
LIMIT_MS = 250

CLICK_AND_WAIT = """
([button, quiet]) => new Promise((resolve, reject) => {
  const main = document.querySelector("[data-testid=stMain]");
  const answer = () => main.querySelector(".tide-measures")?.textContent;
  const before = answer();
  const start = performance.now();
  let last = start;
  const observer = new MutationObserver(() => { last = performance.now(); });
  observer.observe(main, { subtree: true, childList: true, attributes: true, characterData: true });
  button.click();
  const timer = setInterval(() => {
    const now = performance.now();
    if (now - start > 20000) { clearInterval(timer); reject(new Error("no answer to the switch in 20 s")); }
    if (answer() === before || now - last < quiet) return;
    clearInterval(timer);
    observer.disconnect();
    resolve(last - start);
  }, 20);
})
"""


def measure(artifacts: Path, switches: int) -> list[float]:
    """Milliseconds of each switch."""
    with dashboard_server(artifacts) as url, chromium() as browser:
        page = open_page(browser, f"{url}/live")
        page.get_by_role("button", name="bank 0 in layer 0: on").wait_for()
        labels = [
            button.get_attribute("aria-label") or "" for button in page.get_by_role("button", name="in layer").all()
        ]
        names = [label.rsplit(":", 1)[0] for label in labels if label.startswith("bank ")]
        times = []
        for i in range(switches + 2):
            button = page.get_by_role("button", name=names[i * 7 % len(names)])  # 7: walks over layers and banks
            times.append(page.evaluate(CLICK_AND_WAIT, [button.element_handle(), QUIET_MS]))
        return times[2:]  # the first two warm the page up


def main() -> None:
    """Prints the measurement as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifacts", type=Path, default=DEMO_ARTIFACTS)
    parser.add_argument("--switches", type=int, default=30)
    args = parser.parse_args()
    times = measure(args.artifacts, args.switches)
    median = statistics.median(times)
    result = {
        "name": "live_switch",
        "ratios": {"median_to_limit": round(median / LIMIT_MS, 3)},
        "detail": {
            "median_ms": round(median, 1),
            "min_ms": round(min(times), 1),
            "max_ms": round(max(times), 1),
            "n": len(times),
            "limit_ms": LIMIT_MS,
            "cores": os.cpu_count(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
