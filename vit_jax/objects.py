"""Objects on a store (gs://, s3://), by TensorStore's client: one request reads a range or writes
an object, many at once, repeated with growing pauses if the store is busy.
"""

import functools
import re

REQUESTS = 64  # at a time, over all buckets
RETRIES = 10  # of one request, after 429 and 5xx; with pauses of up to MAX_DELAY_S, about 2 minutes
MAX_DELAY_S = 16
ADDRESS = re.compile(r"((?:gs|s3)://[^/]+/)(.*)", re.DOTALL)


def is_object(path: str) -> bool:
    """Whether a path is one that `locate` accepts."""
    return bool(ADDRESS.fullmatch(path))


def locate(path: str):
    """(bucket as a `tensorstore.KvStore`, key) of a path such as gs://BUCKET/KEY."""
    root, key = ADDRESS.fullmatch(path).groups()
    return bucket(root), key


@functools.cache
def bucket(root: str):
    """The bucket of a path such as gs://BUCKET/; opening it makes no request."""
    import tensorstore as ts  # takes a moment; most commands need no store

    return ts.KvStore.open(root, context=context()).result()


@functools.cache
def context():
    import tensorstore as ts

    retries = dict(max_retries=RETRIES, initial_delay="500ms", max_delay=f"{MAX_DELAY_S}s")
    return ts.Context(
        {
            "gcs_request_concurrency": dict(limit=REQUESTS),
            "gcs_request_retries": retries,
            "s3_request_concurrency": dict(limit=REQUESTS),
            "s3_request_retries": retries,
        }
    )
