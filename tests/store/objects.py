"""The objects of a fake store, in memory, with generations and preconditions."""

import base64
import dataclasses
import datetime
import functools
import hashlib
import itertools
import threading

import google_crc32c


class Refused(Exception):
    """The answer is an error: (HTTP status, reason, message)."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status = status
        self.reason = reason


def not_found(what: str) -> Refused:
    return Refused(404, "notFound", f"{what} was not found")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclasses.dataclass(frozen=True)
class Object:
    bucket: str
    name: str
    content: bytes
    content_type: str
    generation: int
    metadata: dict = dataclasses.field(default_factory=dict)
    metageneration: int = 1
    created: str = dataclasses.field(default_factory=now)

    @functools.cached_property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.content).to_bytes(4)).decode()

    @functools.cached_property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.content).digest()).decode()

    def resource(self) -> dict:
        """What the JSON API says of it."""
        return dict(
            kind="storage#object",
            id=f"{self.bucket}/{self.name}/{self.generation}",
            name=self.name,
            bucket=self.bucket,
            generation=str(self.generation),
            metageneration=str(self.metageneration),
            contentType=self.content_type,
            storageClass="STANDARD",
            size=str(len(self.content)),
            md5Hash=self.md5,
            crc32c=self.crc32c,
            etag=f"{self.generation}/{self.metageneration}",
            timeCreated=self.created,
            updated=self.created,
            timeStorageClassUpdated=self.created,
            metadata=self.metadata,
        )


class Objects:
    """Buckets with their objects."""

    def __init__(self, buckets: list[str]):
        self.buckets = {name: {} for name in buckets}
        self.generations = itertools.count(1_700_000_000_000_000)
        self.lock = threading.RLock()

    def bucket(self, name: str) -> dict[str, Object]:
        if name not in self.buckets:
            raise Refused(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[name]

    def check(self, bucket: str, name: str, query: dict, reads: bool = False) -> None:
        """Raises Refused if a precondition of `query` does not hold."""
        current = self.bucket(bucket).get(name)
        generation = current.generation if current else 0
        metageneration = current.metageneration if current else 0
        failed = Refused(412, "conditionNotMet", "a precondition does not hold")
        if int(query.get("ifGenerationMatch", generation)) != generation:
            raise failed
        if int(query.get("ifMetagenerationMatch", metageneration)) != metageneration:
            raise failed
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            raise Refused(304, "notModified", "not modified") if reads else failed

    def get(self, bucket: str, name: str, query: dict) -> Object:
        found = self.bucket(bucket).get(name)
        if found is None:
            raise not_found(f"the object {bucket}/{name}")
        self.check(bucket, name, query, reads=True)
        if int(query.get("generation", found.generation)) != found.generation:
            raise not_found(f"this generation of {bucket}/{name}")
        return found

    def put(self, bucket: str, name: str, content: bytes, query: dict, meta: dict) -> Object:
        """Writes an object in one step. `meta`: its contentType and metadata."""
        if not name or len(name.encode()) > 1024:
            raise Refused(400, "invalid", f"{name!r} can't be the name of an object")
        with self.lock:
            self.check(bucket, name, query)
            content_type = meta.get("contentType") or "application/octet-stream"
            generation = next(self.generations)
            metadata = meta.get("metadata") or {}
            new = Object(bucket, name, bytes(content), content_type, generation, metadata)
            self.bucket(bucket)[name] = new
        return new

    def delete(self, bucket: str, name: str, query: dict) -> None:
        with self.lock:
            if name not in self.bucket(bucket):
                raise not_found(f"the object {bucket}/{name}")
            self.check(bucket, name, query)
            del self.buckets[bucket][name]

    def list(self, bucket: str, query: dict) -> dict:
        """One page: {items, prefixes, nextPageToken}."""
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        trailing = query.get("includeTrailingDelimiter") == "true"
        with self.lock:
            objects = dict(self.bucket(bucket))
        limit = int(query.get("maxResults", 1000))
        first = max(query.get("startOffset", ""), prefix)
        page = {}  # name or prefix -> object or None
        token = query.get("pageToken", "")
        for name in sorted(objects):
            if (
                not name.startswith(prefix)
                or name < first
                or name >= query.get("endOffset", "\uffff")
            ):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            entry = prefix + head + delimiter if found and delimiter else name
            if entry <= token:
                continue
            if entry not in page and len(page) == limit:
                return self.page(page, next_token=list(page)[-1])
            if entry == name:
                page[entry] = objects[name]
                if found and delimiter and not trailing:
                    page[entry] = None
            else:
                page.setdefault(entry, None)
        return self.page(page, next_token="")

    @staticmethod
    def page(entries: dict, next_token: str) -> dict:
        items = [entry.resource() for entry in entries.values() if entry]
        prefixes = [name for name, entry in entries.items() if not entry]
        page = dict(kind="storage#objects")
        if items:
            page |= dict(items=items)
        if prefixes:
            page |= dict(prefixes=prefixes)
        if next_token:
            page |= dict(nextPageToken=next_token)
        return page
