"""Opens a page in a browser without a window, and says what it drew, asked for and complained of."""

import json
import os
import pathlib
import re
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--v=0",
)
# Waits until Bokeh is idle, runs `act` on its document, and leaves what is to be known in the page.
PROBE = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
function canvases(root) {
  let found = [];
  for (const element of root.querySelectorAll("*")) {
    if (element.tagName == "CANVAS") found.push(element);
    if (element.shadowRoot) found = found.concat(canvases(element.shadowRoot));
  }
  return found;
}
function isDrawn(canvas) {
  if (!canvas.width || !canvas.height) return false;
  const context = canvas.getContext("2d");
  return context.getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value);
}
function panels() {
  return Bokeh.documents[0].roots().filter((root) => root.renderers !== undefined);
}
async function look() {
  const drawn_ms = performance.now();
  const before = PANELS;
  ACT
  await new Promise((resolve) => setTimeout(resolve, 500));
  const answer = {
    drawn_ms,
    before,
    after: PANELS,
    canvases: canvases(document).filter(isDrawn).length,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    wide: document.documentElement.scrollWidth - innerWidth,
    images: [...document.images].map((image) => image.naturalWidth),
    errors,
  };
  const place = document.createElement("pre");
  place.id = "probe";
  place.textContent = JSON.stringify(answer);
  document.body.append(place);
}
const started = setInterval(() => {
  const ready = window.Bokeh === undefined || Bokeh.documents.every((one) => one.is_idle);
  if (document.readyState != "complete" || !ready) return;
  clearInterval(started);
  look();
}, 20);
</script>
"""
# Of each chart: the label of its horizontal axis, and of each curve the name and what is drawn.
PANELS = """panels().map((panel) => ({
    label: panel.below[0].axis_label,
    end: panel.x_range.end,
    curves: panel.renderers.filter((one) => one.tags[1] == "curve").map((one) => ({
      name: one.name,
      visible: one.visible,
      x: Array.from(one.data_source.data[one.glyph.x.field]),
      y: Array.from(one.data_source.data[one.glyph.y.field]),
    })),
  }))"""


def find() -> str | None:
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look(page: pathlib.Path, folder: pathlib.Path, act: str = "", width: int = 900) -> dict:
    """What a page is in a browser.

    Args:
      folder: for the profile of the browser.
      act: JavaScript to run once all is drawn, such as a use of the controls.
    """
    text = page.read_text()
    probe = PROBE.replace("PANELS", f"window.Bokeh ? {PANELS} : []").replace("ACT", act)
    copy = folder / "probed.html"
    copy.write_text(text.replace("<head>", f"<head>{probe}", 1))
    words = [find(), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000"]
    words += ["--virtual-time-budget=15000", "--dump-dom", copy.as_uri()]
    environment = os.environ | dict(HOME=str(folder))
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    answer = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    lines = re.findall(r":(?:INFO|WARNING|ERROR):CONSOLE:\d+\] (.*)", done.stderr)
    answer["console"] = [
        line for line in lines if "[bokeh" not in line and "ResizeObserver" not in line
    ]
    return answer
