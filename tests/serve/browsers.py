"""A chromium that shows a page, for tests of what a person sees."""

from __future__ import annotations

import json
import shutil
import subprocess

import httpx
import pytest
from serving import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# How often the page draws a rectangle, a letter or anything else.
COUNT_CALLS = """
globalThis.calls = 0
const context = CanvasRenderingContext2D.prototype
for (const name of Object.getOwnPropertyNames(context)) {
  const own = Object.getOwnPropertyDescriptor(context, name).value
  if (typeof own === "function") context[name] = function (...all) { calls++; return own.apply(this, all) }
}
"""


class Browser:
    """Chromium without a window, spoken to over its DevTools protocol."""

    def __init__(self, folder, width, height=900):
        import websockets.sync.client as client

        options = [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--remote-debugging-port=0"]
        options += ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"], stderr=subprocess.DEVNULL, start_new_session=True
        )
        port = folder / "DevToolsActivePort"
        until(lambda: port.exists() and len(port.read_text().split()) == 2)
        base = f"http://127.0.0.1:{port.read_text().split()[0]}"
        (page,) = [one for one in httpx.get(f"{base}/json").json() if one["type"] == "page"]
        self.socket = client.connect(page["webSocketDebuggerUrl"], max_size=1 << 26)
        self.number, self.events = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while (got := json.loads(self.socket.recv(60))).get("id") != self.number:
            self.events.append(got)
        assert "error" not in got, got
        return got["result"]

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression):
        until(lambda: self.value(expression))

    def requested(self):
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self):
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        found = [event for event in self.events if event["method"] in kinds]
        return [one for one in found if one["params"].get("entry", {}).get("level") not in ("verbose", "info")]

    def click(self, x, y):
        """Clicks on a place of the icicle."""
        left, top = self.value("(e => [e.left, e.top])(document.getElementById('icicle').getBoundingClientRect())")
        if top > self.value("innerHeight") - 100:
            self.value(f"scrollTo(0, {top - 100})")
            left, top = self.value("(e => [e.left, e.top])(document.getElementById('icicle').getBoundingClientRect())")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=left + x, y=top + y, button="left", clickCount=1)

    def picture(self, path):
        import base64

        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(params=[1200, pytest.param(360, marks=pytest.mark.slow)])
def browser(request, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    pytest.importorskip("websockets")
    made = Browser(tmp_path / "profile", request.param)
    yield made
    made.close()
