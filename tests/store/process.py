"""A fake store as a process of its own, because TensorFlow's client holds Python's lock while it
writes.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.parse
import urllib.request

SERVE = pathlib.Path(__file__).with_name("serve.py")


class RunningStore:
    """Ends with the body of a `with` statement."""

    def __init__(self, folder: pathlib.Path):
        """`folder`: for the file of variables."""
        path = folder / "store.env"
        environment = os.environ | dict(PYTHONPATH=str(SERVE.parent.parent))
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), f"--env={path}"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        while not path.exists():
            assert self.process.poll() is None
            time.sleep(0.01)
        lines = path.read_text().replace("export ", "").splitlines()
        self.environment = dict(line.split("=", 1) for line in lines)
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, method: str, path: str, **body) -> bytes:
        return self.send(method, path, json.dumps(body).encode())

    def send(self, method: str, path: str, body: bytes) -> bytes:
        """The answer to a request that has no fault and is not recorded."""
        url = self.environment["TENSORSTORE_GCS_HTTP_URL"] + path
        request = urllib.request.Request(url, body, {"X-Of-A-Test": "1"}, method=method)
        with self.open(request) as answer:
            return answer.read()

    def set_faults(self, rules: str = "", **more) -> None:
        """See `Faults`."""
        self.ask("POST", "/_faults", rules=rules, **more)

    def requests(self) -> list[dict]:
        """All requests until now; see `Handler.record`."""
        return json.loads(self.ask("GET", "/_requests"))["requests"]

    def injected(self) -> dict[str, int]:
        """Kind of fault -> how many requests had it."""
        return json.loads(self.ask("GET", "/_requests"))["injected"]

    def read(self, path: str) -> bytes:
        """The content of an object BUCKET/KEY."""
        return self.ask("GET", f"/{path}")

    def write(self, path: str, content: bytes) -> None:
        """Makes an object BUCKET/KEY."""
        bucket, key = path.split("/", 1)
        name = urllib.parse.quote(key, safe="")
        self.send("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}", content)

    def names(self, prefix: str = "") -> list[str]:
        """The keys of the objects below a prefix in the bucket `bucket`."""
        found = json.loads(self.ask("GET", f"/storage/v1/b/bucket/o?prefix={prefix}"))
        return [item["name"] for item in found.get("items", [])]

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.process.terminate()
        self.process.wait()
