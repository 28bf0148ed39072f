"""Addresses of weights: what is refused, what may pass, and what messages show of them. Broken and
hostile servers are in tests/faults/trials_of_networks.py.
"""

import errno
import http.client
import io
import logging
import socket
import ssl
import urllib.error

import pytest
from conftest import TINY

from vit_jax import predict
from vit_jax.cli.log import Formatter
from vit_jax.errors import Unavailable, UserError, printable, without_secrets
from vit_jax.train import __main__ as train
from vit_jax.weights.formats import download


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h.org:8080/a@b/w.npz", "https://h.org:8080/a@b/w.npz"),
        ("https://h/w.npz?X-Goog-Signature=1&b=2", "https://h/w.npz?..."),
        ("HTTPS://me:pw@h/w", "HTTPS://...@h/w"),
        ("https://me:p/x?y#z@h/w?sig", "https://...@h/w?..."),
        ("s3://key:pw@bucket/w and gs://bucket/w?x", "s3://...@bucket/w and gs://bucket/w?x"),
        ("http://[::1]:80/a@b?c", "http://[::1]:80/a@b?..."),
        ("a: 'http://h/?b' -> 'http://h/?c'; (see http://h/?d): e@f", "a: 'http://h/?...' -> "
         "'http://h/?...'; (see http://h/?...): e@f"),
        ("a@b is none? not at all: c://", "a@b is none? not at all: c://"),
    ],
)  # fmt: skip
def test_messages_show_no_secrets(text, shown):
    assert without_secrets(text) == shown == without_secrets(shown)
    assert printable(f"{text} \x1b") == f"{shown} \\x1b"


@pytest.mark.parametrize(
    ("before", "location", "target"),
    [
        ("http://h/a/b?c", "d", "http://h/a/d"),
        ("http://h/a", "https://i/b?c", "https://i/b?c"),
        ("https://h/a", "//i/b \xe9", "https://i/b%20%E9"),
        ("https://h/a", "http://h/a", "it redirects from https to http"),
        ("http://h/a", "file:///etc/passwd?x", "it redirects from http to file"),
        ("https://h/a", "ftp://h/a", "it redirects from https to ftp"),
        ("https://h/a", "https://u:pw@h/a", "a user or password"),
        ("https://h/a", "https://h:99999/a", "it is not of the form"),
    ],
)
def test_redirects_stay_encrypted(before, location, target):
    try:
        found = download.redirected(before, location)
    except ValueError as error:
        found = str(error)
    assert found == target or (" " in target and found.startswith(target))


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (urllib.error.HTTPError("http://h", 503, "Busy", {}, io.BytesIO()), True),
        (urllib.error.HTTPError("http://h", 429, "Slowly", {}, io.BytesIO()), True),
        (urllib.error.HTTPError("http://h", 401, "No", {}, io.BytesIO()), False),
        (urllib.error.HTTPError("http://h", 404, "No", {}, io.BytesIO()), False),
        (urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), True),
        (urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "unknown")), False),
        (urllib.error.URLError(ssl.SSLCertVerificationError("expired")), False),
        (TimeoutError("timed out"), True),
        (http.client.IncompleteRead(b""), True),
        (http.client.BadStatusLine("220"), False),
        (ValueError("no number"), False),
    ],
)
def test_what_may_pass_is_worth_another_try(error, may_pass):
    failure = download.failure("http://h/w?s3cret", error)
    assert isinstance(failure, Unavailable) == may_pass
    assert failure.exit_code == (69 if may_pass else 2)
    assert str(failure).startswith("http://h/w?... can't be fetched (")


def test_no_command_says_the_secrets(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(TINY)
    config = f"--config={tmp_path}/tiny.py"
    first, second = "http://127.0.0.1:1/w.npz?sig=s3cret", "http://me:s3cret@h/w.npz"
    assert predict.main([f"--checkpoint={first}", "x.jpg"]) == Unavailable.exit_code
    assert predict.main([f"--checkpoint={second}", "x.jpg"]) == UserError.exit_code
    both = [f"--config.init_from={first}", f"--config.branch_from={second}"]
    assert train.main([config, f"--workdir={tmp_path}/run", *both]) == UserError.exit_code
    with pytest.raises(SystemExit):
        train.main([config, f"--dry_run={first}"])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" can't be")[0] for line in lines[:2]] == [
        "error: http://127.0.0.1:1/w.npz?...",
        "error: http://...@h/w.npz",
    ]
    both = "init_from=http://127.0.0.1:1/w.npz?... and branch_from=http://...@h/w.npz are both set"
    assert both in lines[2]
    assert len(lines) == 4 and "s3cret" not in "".join(lines)
    log = Formatter("%(message)s").format(logging.makeLogRecord(dict(msg=f"from {first}")))
    assert log == "from http://127.0.0.1:1/w.npz?..."
