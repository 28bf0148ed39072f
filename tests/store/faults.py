"""Which requests of a fake store fail, and how: chosen by a seed, the same in every run."""

import dataclasses
import hashlib
import itertools
import re
import threading

BURST = 4  # requests in a row
STATUSES = {
    "401": (401, "authError", "Invalid Credentials"),
    "403": (403, "forbidden", "the caller does not have storage.objects access"),
    "404": (404, "notFound", "No such object"),
    "429": (429, "rateLimitExceeded", "the object exceeded the rate limit"),
    "503": (503, "backendError", "the service is currently unavailable"),
}
KINDS = {
    "401": "the credentials are not valid",
    "403": "permission is denied",
    "429": "too many requests",
    "429_burst": f"the same, for {BURST} requests in a row",
    "503": "the service is not available",
    "503_burst": f"the same, for {BURST} requests in a row",
    "reset": "the connection is reset, in half of the cases after the request was done",
    "stall": "the request is taken, and nothing is sent for `stall_s`",
    "truncated": "half of the body is sent, then the connection is closed",
    "checksum": "one bit of the content is flipped; the checksum is that of the object",
    "missing": "404 for an object that exists",
    "slow": "the answer comes after `slow_s`",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A share of the requests with numbers in [first, last] fails in this way."""

    kind: str
    share: float
    first: int = 0
    last: int = 2**62

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """`text`: KIND:SHARE or KIND:SHARE@FIRST-LAST."""
        match = re.fullmatch(r"(\w+):([\d.]+)(?:@(\d+)-(\d+))?", text)
        if not match or match[1] not in KINDS:
            raise ValueError(f"{text!r} is not KIND:SHARE[@FIRST-LAST] with one of {list(KINDS)}")
        bounds = [int(bound) for bound in match.groups()[2:] if bound]
        return cls(match[1], float(match[2]), *bounds)


class Faults:
    """Decides for one request after the other."""

    def __init__(self, rules: str = "", seed: int = 0, stall_s: float = 5, slow_s: float = 1):
        """`rules`: such as "503:0.05,403:1@100-140"; numbers count from 0, from now on."""
        self.rules = [Rule.parse(rule) for rule in rules.split(",") if rule]
        self.seed = seed
        self.stall_s = stall_s
        self.slow_s = slow_s
        self.numbers = itertools.count()
        self.lock = threading.Lock()

    def draw(self, *what) -> float:
        """A number in [0, 1) that depends on the seed and `what`."""
        digest = hashlib.sha256(repr((self.seed, *what)).encode()).digest()
        return int.from_bytes(digest[:7]) / 2**56

    def next(self) -> tuple[str, float]:
        """(kind of the fault of the next request or "", a random number for its details)."""
        with self.lock:
            number = next(self.numbers)
        for rule in self.rules:
            unit = number // BURST if rule.kind.endswith("_burst") else number
            if rule.first <= number <= rule.last and self.draw(rule.kind, unit) < rule.share:
                return rule.kind, self.draw("details", number)
        return "", 0.0
