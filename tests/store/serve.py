"""Serves a fake Cloud Storage on 127.0.0.1 until it is ended, and prints the variables that lead the
clients there:

PYTHONPATH=tests python tests/store/serve.py --env=store.env &
. ./store.env
"""

import argparse
import os
import pathlib
import tempfile
import threading
import time

from store.faults import Faults
from store.server import Store


def end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--env", type=pathlib.Path, help="file to write the variables to")
    parser.add_argument("--buckets", default="bucket", help="with commas between them")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency_ms", type=float, default=0.0, help="before every answer")
    parser.add_argument("--faults", default="", help="KIND:SHARE[@FIRST-LAST], with commas")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--stall_s", type=float, default=5.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(
            args.buckets.split(","), pathlib.Path(folder), args.port, args.latency_ms / 1000
        )
        store.faults = Faults(args.faults, args.seed, args.stall_s)
        lines = [f"export {name}={value}\n" for name, value in store.environment().items()]
        if args.env:
            fresh = args.env.with_name(args.env.name + ".tmp")
            fresh.write_text("".join(lines))
            fresh.replace(args.env)
        print(*lines, sep="", flush=True)
        threading.Thread(target=end_with_parent, daemon=True).start()
        store.serve_forever()


if __name__ == "__main__":
    main()
