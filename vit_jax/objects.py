"""Objects on a store (gs://, s3://), by TensorStore's client.

A request reads a range or writes an object. Many are under way at a time; one that fails because
the store is busy is repeated after growing pauses.
"""

import functools
import os
import re

REQUESTS = 64  # at a time, over all buckets
RETRIES = 10  # of one request, after 429 and 5xx; with pauses of up to MAX_DELAY_S, about 2 minutes
MAX_DELAY_S = 16
STALL_S = 30  # without a byte, after which a request is repeated
CONNECT_S = 10
ADDRESS = re.compile(r"((?:gs|s3)://[^/]+/)(.*)", re.DOTALL)


def is_object(path: str) -> bool:
    """Whether a path is one that `locate` accepts."""
    return bool(ADDRESS.fullmatch(path))


def locate(path: str, retries: int = RETRIES):
    """(bucket as a `tensorstore.KvStore`, key) of a path such as gs://BUCKET/KEY."""
    root, key = ADDRESS.fullmatch(path).groups()
    return bucket(root, retries), key


@functools.cache
def bucket(root: str, retries: int = RETRIES):
    """The bucket of a path such as gs://BUCKET/; opening it makes no request."""
    import tensorstore as ts  # takes a moment; most commands need no store

    return ts.KvStore.open(root, context=context(retries)).result()


def read(path: str, start: int | None = None, stop: int | None = None, retries: int = RETRIES):
    """Begins to read the bytes from `start` up to `stop`; a negative `start` counts from the end.

    Returns:
      a future of a `tensorstore.KvStore.ReadResult`, with `state`, `value` and `stamp`.
    """
    store, key = locate(path, retries)
    return store.read(key, byte_range=slice(start, stop))


@functools.cache
def context(retries: int = RETRIES):
    # These are read when TensorStore's client is used for the first time.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(STALL_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(CONNECT_S))
    import tensorstore as ts

    repeat = dict(max_retries=retries, initial_delay="500ms", max_delay=f"{MAX_DELAY_S}s")
    return ts.Context(
        {
            "gcs_request_concurrency": dict(limit=REQUESTS),
            "gcs_request_retries": repeat,
            "s3_request_concurrency": dict(limit=REQUESTS),
            "s3_request_retries": repeat,
        }
    )
