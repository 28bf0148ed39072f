"""A fake Cloud Storage over HTTP on the loopback, for the real clients.

Plain HTTP serves TensorStore, google-cloud-storage and google-cloud-cpp, which can be given another
address. TensorFlow's client can't: it comes by CONNECT, as to a proxy, and finds TLS for the true
host names with a certificate of our own.
"""

import collections
import http.server
import json
import re
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.parse
from email.parser import BytesParser

from store.faults import STATUSES, Faults
from store.objects import Objects, Refused

HOSTS = ("storage.googleapis.com", "www.googleapis.com")
OBJECT = r"/b/(?P<bucket>[^/]+)/o/(?P<name>.+?)"
ROUTES = (  # (method, pattern of the path, name of the method below)
    ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)", "get_bucket"),
    ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/storageLayout", "get_layout"),
    ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o/?", "list_objects"),
    ("GET", rf"(?:/download)?/storage/v1{OBJECT}", "get_object"),
    ("GET", r"/(?P<bucket>[a-z0-9][^/]+)/(?P<name>.+)", "get_content"),
    ("POST", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", "upload"),
    ("PUT", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", "continue_upload"),
    ("DELETE", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", "cancel_upload"),
    ("POST", rf"/storage/v1{OBJECT}/(?:rewriteTo|copyTo)/b/(?P<to>[^/]+)/o/(?P<new>.+)", "copy"),
    ("POST", rf"/storage/v1{OBJECT}/compose", "compose"),
    ("DELETE", rf"/storage/v1{OBJECT}", "delete_object"),
    ("GET", r"/_requests", "show_requests"),
    ("DELETE", r"/_requests", "forget_requests"),
    ("POST", r"/_faults", "set_faults"),
)


def client_of(agent: str) -> str:
    """Which client sends this User-Agent."""
    for mark, name in (
        ("TensorFlow", "tensorflow"),
        ("TSL", "tensorflow"),
        ("tensorstore", "tensorstore"),
        ("gcloud-python", "python"),
        ("gcloud-cpp", "cpp"),
        ("gl-cpp", "cpp"),
    ):
        if mark in agent:
            return name
    return agent or "tensorflow"


class Store(http.server.ThreadingHTTPServer):
    """The state of the store, and what it was asked."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, buckets, folder, port: int = 0, latency_s: float = 0.0):
        """`folder`: for the certificate."""
        super().__init__(("127.0.0.1", port), Handler)
        self.objects = Objects(buckets)
        self.faults = Faults()
        self.latency_s = latency_s
        self.uploads: dict[str, Upload] = {}
        self.requests: list[dict] = []
        self.injected = collections.Counter()
        self.lock = threading.Lock()
        self.certificate = make_certificate(folder)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(self.certificate, folder / "key.pem")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """The variables that lead all clients here."""
        return dict(
            TENSORSTORE_GCS_HTTP_URL=self.url,
            STORAGE_EMULATOR_HOST=self.url,
            CLOUD_STORAGE_EMULATOR_ENDPOINT=self.url,
            GOOGLE_CLOUD_PROJECT="fake",
            GOOGLE_AUTH_TOKEN_FOR_TESTING="fake",
            NO_GCE_CHECK="true",
            https_proxy=self.url,
            no_proxy="127.0.0.1,localhost",
            CURL_CA_BUNDLE=str(self.certificate),
        )

    def handle_error(self, request, client_address):
        """A client that goes away is no error of the server."""


class Upload:
    """A resumable upload that is not finished."""

    def __init__(self, bucket: str, query: dict, meta: dict):
        self.bucket = bucket
        self.query = query
        self.meta = meta
        self.content = bytearray()
        self.done = None  # the resource, for a client that did not hear the last answer


def make_certificate(folder):
    """A certificate for the hosts of Cloud Storage, its own authority."""
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30"]
    command += ["-subj", "/CN=fake store", "-addext", f"subjectAltName={names}"]
    command += ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem"


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    scheme = "http"
    server: Store

    def log_message(self, *_):
        pass

    def do_CONNECT(self):
        self.send_response_only(200)
        self.end_headers()
        self.wfile.flush()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.scheme = "https"
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def serve(self):
        self.body = self.read_body()
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.status = 0
        self.sent = 0
        self.fault = ""
        self.detail = 0.0
        self.what = urllib.parse.unquote(url.path)
        is_ours = url.path.startswith("/_") or "X-Of-A-Test" in self.headers
        if not is_ours:
            time.sleep(self.server.latency_s)
            self.fault, self.detail = self.server.faults.next()
        began = time.time()
        try:
            self.route(url.path)
        except Refused as refused:
            self.refuse(refused.status, refused.reason, str(refused))
        if not is_ours:
            self.record(began)

    def record(self, began: float) -> None:
        line = dict(
            time=began,
            client=client_of(self.headers.get("User-Agent", "")),
            method=self.command,
            what=self.query.get("name") or self.what,
            query=self.query,
            status=self.status,
            bytes=self.sent or len(self.body),
            fault=self.fault,
        )
        with self.server.lock:
            self.server.requests.append(line)
            if self.fault:
                self.server.injected[self.fault] += 1

    def route(self, path: str) -> None:
        method = "GET" if self.command == "HEAD" else self.command
        if self.fault and self.fail_before():
            return
        for verb, pattern, name in ROUTES:
            match = verb == method and re.fullmatch(pattern, path)
            if match:
                words = {key: urllib.parse.unquote(text) for key, text in match.groupdict().items()}
                getattr(self, name)(**words)
                return
        raise Refused(400, "invalid", f"{self.command} {self.path} is not known here")

    # --- faults ---

    def fail_before(self) -> bool:
        """Whether the request is answered, or not at all, by a fault."""
        kind = self.fault.removesuffix("_burst")
        if kind == "missing":
            if self.command != "GET":
                self.fault = ""
                return False
            kind = "404"
        if kind in STATUSES:
            self.refuse(*STATUSES[kind])
            return True
        if kind == "slow":
            time.sleep(self.server.faults.slow_s)
        if kind == "stall":
            time.sleep(self.server.faults.stall_s)
            self.reset()
            return True
        if kind == "reset" and self.detail < 0.5:
            self.reset()
            return True
        return False

    def reset(self) -> None:
        """Ends the connection with RST."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def damaged(self, content: bytes) -> bytes:
        if self.fault != "checksum" or not content:
            return content
        place = int(self.detail * len(content))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    # --- requests and answers ---

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def answer(self, status: int, content: bytes = b"", **headers) -> None:
        self.status = status
        self.sent = len(content)
        if self.fault == "reset" and self.detail >= 0.5:  # after the request was done
            return self.reset()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if self.fault == "truncated" and content:
            self.wfile.write(content[: len(content) // 2])
            return self.reset()
        self.wfile.write(self.damaged(content) if 200 <= status < 300 else content)
        return None

    def answer_json(self, value, status: int = 200, **headers) -> None:
        content = json.dumps(value).encode()
        if self.fault == "checksum":
            self.fault = ""  # metadata have no checksum
        self.answer(status, content, Content_Type="application/json; charset=UTF-8", **headers)

    def refuse(self, status: int, reason: str, message: str) -> None:
        if status == 304:
            return self.answer(304)
        error = dict(domain="global", reason=reason, message=message)
        return self.answer_json(
            dict(error=dict(code=status, message=message, errors=[error])), status
        )

    # --- buckets ---

    def get_bucket(self, bucket: str) -> None:
        self.server.objects.bucket(bucket)
        self.answer_json(dict(kind="storage#bucket", id=bucket, name=bucket, location="LOCAL"))

    def get_layout(self, bucket: str) -> None:
        self.server.objects.bucket(bucket)
        flat = dict(enabled=False)
        self.answer_json(
            dict(kind="storage#storageLayout", bucket=bucket, hierarchicalNamespace=flat)
        )

    def list_objects(self, bucket: str) -> None:
        self.answer_json(self.server.objects.list(bucket, self.query))

    # --- objects ---

    def get_object(self, bucket: str, name: str) -> None:
        if self.query.get("alt") == "media":
            return self.get_content(bucket, name)
        return self.answer_json(self.server.objects.get(bucket, name, self.query).resource())

    def get_content(self, bucket: str, name: str) -> None:
        found = self.server.objects.get(bucket, name, self.query)
        headers = dict(
            Content_Type=found.content_type,
            ETag=f'"{found.md5}"',
            x_goog_generation=found.generation,
            x_goog_metageneration=found.metageneration,
            x_goog_stored_content_length=len(found.content),
            x_goog_hash=f"crc32c={found.crc32c},md5={found.md5}",
        )
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        size = len(found.content)
        if not span:
            return self.answer(200, found.content, **headers)
        first, last = span.groups()
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            return self.answer(416, Content_Range=f"bytes */{size}")
        headers |= dict(Content_Range=f"bytes {start}-{stop - 1}/{size}")
        return self.answer(206, found.content[start:stop], **headers)

    def delete_object(self, bucket: str, name: str) -> None:
        self.server.objects.delete(bucket, name, self.query)
        self.answer(204)

    def copy(self, bucket: str, name: str, to: str, new: str) -> None:
        source = self.server.objects.get(bucket, name, {})
        meta = dict(contentType=source.content_type, metadata=source.metadata)
        made = self.server.objects.put(to, new, source.content, self.query, meta).resource()
        size = str(len(source.content))
        self.answer_json(
            dict(
                kind="storage#rewriteResponse",
                totalBytesRewritten=size,
                objectSize=size,
                done=True,
                resource=made,
            )
        )

    def compose(self, bucket: str, name: str) -> None:
        request = json.loads(self.body)
        parts = [
            self.server.objects.get(bucket, part["name"], {}).content
            for part in request["sourceObjects"]
        ]
        meta = request.get("destination", {})
        made = self.server.objects.put(bucket, name, b"".join(parts), self.query, meta)
        self.answer_json(made.resource())

    # --- uploads ---

    def upload(self, bucket: str) -> None:
        kind = self.query.get("uploadType")
        if kind == "resumable":
            return self.begin_upload(bucket)
        meta = dict(contentType=self.headers.get("Content-Type"))
        content = self.body
        if kind == "multipart":
            meta, content = self.parts()
        name = self.query.get("name") or meta["name"]
        made = self.server.objects.put(bucket, name, content, self.query, meta)
        return self.answer_json(made.resource())

    def parts(self) -> tuple[dict, bytes]:
        """(metadata, content) of a multipart body."""
        boundary = re.search(r'boundary="?([^";]+)"?', self.headers["Content-Type"])[1].encode()
        _, first, second, _ = self.body.split(b"--" + boundary)
        meta = BytesParser().parsebytes(first.lstrip(b"\r\n")).get_payload()
        _, _, content = second.partition(b"\r\n\r\n")
        return json.loads(meta), content.removesuffix(b"\r\n")

    def begin_upload(self, bucket: str) -> None:
        self.server.objects.bucket(bucket)
        meta = json.loads(self.body or b"{}")
        meta.setdefault("contentType", self.headers.get("X-Upload-Content-Type"))
        query = self.query | dict(name=self.query.get("name") or meta.get("name"))
        self.server.objects.check(bucket, query["name"], query)
        with self.server.lock:
            number = f"upload{len(self.server.uploads)}"
            self.server.uploads[number] = Upload(bucket, query, meta)
        words = urllib.parse.urlencode(
            dict(uploadType="resumable", name=query["name"], upload_id=number)
        )
        place = f"{self.scheme}://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?{words}"
        self.answer(200, Location=place, X_GUploader_UploadID=number)

    def continue_upload(self, bucket: str) -> None:
        upload = self.server.uploads.get(self.query.get("upload_id"))
        if upload is None:
            raise Refused(404, "notFound", "there is no such upload")
        if upload.done:
            return self.answer_json(upload.done)
        span = self.headers.get("Content-Range", f"bytes 0-{len(self.body) - 1}/{len(self.body)}")
        start, total = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", span).groups()
        if start is not None:
            if int(start) > len(upload.content):
                raise Refused(503, "backendError", "a part is missing")
            upload.content[int(start) :] = self.body
        if total != "*" and len(upload.content) == int(total):
            made = self.server.objects.put(
                bucket, upload.query["name"], upload.content, upload.query, upload.meta
            )
            upload.done = made.resource()
            return self.answer_json(upload.done)
        headers = {}
        if upload.content:
            headers = dict(Range=f"bytes=0-{len(upload.content) - 1}")
        return self.answer(308, **headers)

    def cancel_upload(self, bucket: str) -> None:
        self.server.uploads.pop(self.query.get("upload_id"), None)
        self.answer(499)

    # --- what tests ask ---

    def show_requests(self) -> None:
        with self.server.lock:
            found = dict(requests=self.server.requests, injected=self.server.injected)
            self.answer_json(found)

    def forget_requests(self) -> None:
        with self.server.lock:
            self.server.requests = []
            self.server.injected.clear()
        self.answer(204)

    def set_faults(self) -> None:
        """Body: the arguments of `Faults`."""
        self.server.faults = Faults(**json.loads(self.body))
        self.answer(204)
