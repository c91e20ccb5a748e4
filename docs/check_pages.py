"""Checks in headless Chromium that no built page is wider than a screen.

    bash scripts/docs.sh
    python docs/check_pages.py [--html DIR]

Each page is loaded at the widths of a phone, a tablet and a laptop, and must fit each.
On a laptop, tables must fit without scrolling, too.
"""

import argparse
import contextlib
import functools
import html
import http.server
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Final

WIDTHS: Final = (390, 768, 1400)
"""Pixels of a phone, a tablet and a laptop."""

_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_SECONDS: Final = 240
_CHECKER: Final = "check_pages.html"

# Loads page after page into a frame of each width. A frame of the same origin can be
# measured. Hidden parts of the theme, such as the side bar on a phone, are left out.
_SCRIPT: Final = """
const found = [];
function measure(frame, page, width) {
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > root.clientWidth + 1)
    found.push(`${page} at ${width}: page of ${root.scrollWidth} pixels`);
  if (width < LAPTOP) return;
  const article = root.querySelector(".bd-article");
  const edge = article ? article.getBoundingClientRect().right + 1 : Infinity;
  for (const table of article ? article.querySelectorAll("table") : []) {
    const right = Math.max(table.getBoundingClientRect().right,
      ...[...table.rows].map((row) => row.getBoundingClientRect().right));
    if (right > edge)
      found.push(`${page} at ${width}: ${Math.round(right - edge)} pixels too wide: ` +
        table.textContent.trim().slice(0, 40).replace(/\\s+/g, " "));
  }
}
async function run() {
  for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    document.body.append(frame);
    for (const page of PAGES) {
      await new Promise((done) => { frame.onload = done; frame.src = page; });
      measure(frame, page, width);
    }
    frame.remove();
  }
  document.body.innerHTML = "";
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}
window.onload = run;
"""


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def find_overflows(
    directory: pathlib.Path, browser: str, widths: Sequence[int] = WIDTHS
) -> list[str]:
    """Returns one line for each part of a page that does not fit.

    Args:
      directory: built HTML pages.
      browser: path of a Chromium.
      widths: widths of screens in pixels; tables must fit the last one.

    Raises:
      RuntimeError: if Chromium does not answer; the message has its last words.
    """
    pages = sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*.html")
        if "_modules" not in path.parts and path.name != _CHECKER
    )
    names = f"const PAGES = {json.dumps(pages)}, WIDTHS = {json.dumps(widths)};"
    laptop = f"const LAPTOP = {widths[-1]};"
    checker = directory / _CHECKER
    checker.write_text(
        f"<!doctype html><body><script>{names}{laptop}{_SCRIPT}</script>"
    )
    try:
        with _served(directory) as address, tempfile.TemporaryDirectory() as profile:
            text = _dump(browser, f"{address}/{_CHECKER}", profile)
    finally:
        checker.unlink()
    return json.loads(text)


def _dump(browser: str, address: str, profile: str) -> str:
    """Returns the text of the element `result` once the page has filled it."""
    command = [
        browser,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-sync"),
        *("--disable-component-update", f"--user-data-dir={profile}"),
        f"--timeout={1000 * _SECONDS}",
        f"--virtual-time-budget={1000 * _SECONDS}",
        *("--dump-dom", address),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * _SECONDS, check=False
    )
    start, end = '<pre id="result">', "</pre>"
    if start not in run.stdout:
        raise RuntimeError(f"{browser} gave no result: {run.stderr[-1500:]}")
    return html.unescape(run.stdout.split(start)[1].split(end)[0])


@contextlib.contextmanager
def _served(directory: pathlib.Path) -> Iterator[str]:
    """Serves a directory on this machine; yields its address."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Writes no line per request."""


def main() -> int:
    """Prints what does not fit; returns 1 if there is anything."""
    parser = argparse.ArgumentParser(description="Checks the widths of the pages.")
    default = pathlib.Path(__file__).parent / "_build" / "html"
    parser.add_argument("--html", type=pathlib.Path, default=default)
    arguments = parser.parse_args()
    browser = find_browser()
    if browser is None:
        parser.error(f"none of {', '.join(_BROWSERS)} is installed")
    overflows = find_overflows(arguments.html, browser)
    print(*overflows, sep="\n")
    return 1 if overflows else 0


if __name__ == "__main__":
    sys.exit(main())
