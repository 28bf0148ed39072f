"""Downloads on the loopback: kept in the cache, continued where they broke off, and checked."""

import io
import logging
import pathlib
import threading
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, golden_file, golden_folder, last_error
from servers import File, serving

import vit_jax
from vit_jax import convert
from vit_jax.cli import progress
from vit_jax.cli.terminal import Console
from vit_jax.errors import Unavailable, UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.weights import load as pretrained
from vit_jax.weights import published, scan_layout
from vit_jax.weights.formats import fetch, transfer

NAME = "augreg/B_16"
PATH = f"/{published.PATHS[NAME]}.npz"


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    with serving() as server:
        monkeypatch.setattr(published, "STORE", server.address)
        yield server


@pytest.fixture
def body(tmp_path) -> bytes:
    return golden_file(tmp_path, "vit_token_rep").read_bytes()


def fetched(path, tmp_path) -> bytes:
    return pathlib.Path(fetch.locate(path, tmp_path)).read_bytes()


def test_a_name_is_downloaded_once_and_needs_no_network_then(server, body, tmp_path):
    server.files[PATH] = File(body)
    weights = pretrained.read(NAME)
    wanted = pretrained.read(golden_file(tmp_path, "vit_token_rep"))
    assert weights.path == NAME and weights.fields == wanted.fields
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(weights.params[name], value)
    for spelling in (NAME, f"{NAME}.npz", published.PATHS[NAME], f"{published.PATHS[NAME]}.npz"):
        assert fetched(spelling, tmp_path) == body
    assert len(server.requests) == 1
    assert not list((tmp_path / "cache").rglob("*.part*"))


def test_a_local_path_of_that_name_wins(server, body, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "augreg").mkdir()
    (tmp_path / NAME).write_bytes(body)
    assert fetched(NAME, tmp_path) == body
    assert not server.requests


def test_a_download_that_breaks_off_continues_with_the_same_command(server, body, tmp_path):
    server.files[PATH] = File(body, breaks_at=(1000, 50_000))
    for size in (1000, 50_000):
        with pytest.raises(Unavailable, match=rf"ended after {size} of|ended after 49000 of"):
            pretrained.read(NAME)
    assert fetched(NAME, tmp_path) == body
    assert server.ranges() == [None, "bytes=1000-", "bytes=50000-"]


def test_a_large_part_is_continued_at_once(server, body, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(transfer, "GAIN", 1000)
    server.files[PATH] = File(body, breaks_at=(1000, 50_000, 50_500))
    with pytest.raises(Unavailable, match="ended after 500 of"):
        fetched(NAME, tmp_path)
    assert caplog.text.count("continuing") == 2
    assert fetched(NAME, tmp_path) == body
    assert server.ranges()[-1] == "bytes=50500-"


def test_a_server_without_ranges_sends_all_again(server, body, tmp_path):
    server.files[PATH] = File(body, breaks_at=(1000,), ignores_range=True)
    with pytest.raises(Unavailable):
        fetched(NAME, tmp_path)
    assert fetched(NAME, tmp_path) == body


@pytest.mark.parametrize("obeys", [True, False], ids=["If-Range", "no If-Range"])
def test_parts_of_two_versions_are_never_joined(obeys, server, body, tmp_path):
    server.files[PATH] = File(body, etag='"1"', breaks_at=(1000,))
    with pytest.raises(Unavailable):
        fetched(NAME, tmp_path)
    new = body[:500] + bytes(500) + body[1000:]
    server.files[PATH] = File(new, etag='"2"')
    if not obeys:  # it answers the range although the file is another one
        (facts,) = (tmp_path / "cache").rglob("*.part.facts")
        facts.write_text(facts.read_text().replace('\\"1\\"', '\\"2\\"'))
    assert fetched(NAME, tmp_path) == new
    assert server.ranges() == ([None, "bytes=1000-"] if obeys else [None, "bytes=1000-", None])


def test_a_complete_part_of_a_process_that_was_killed_is_the_file(server, body, tmp_path):
    server.files[PATH] = File(body, breaks_at=(1000,))
    with pytest.raises(Unavailable):
        fetched(NAME, tmp_path)
    (part,) = (tmp_path / "cache").rglob("*.part")
    part.write_bytes(body)
    assert fetched(NAME, tmp_path) == body and len(server.requests) == 1


def test_redirects_are_followed_but_not_in_circles(server, body, tmp_path):
    server.files |= {
        PATH: File(b"", location="/a"),
        "/a": File(b"", location="/b"),
        "/b": File(body),
    }
    assert fetched(NAME, tmp_path) == body
    address = f"{server.address}/circle.npz"
    server.files["/circle.npz"] = File(b"", location="/circle.npz")
    with pytest.raises(UserError, match=rf"{address} can't be fetched \(it redirects more than 5"):
        pretrained.read(address)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (dict(length=300_000), r"ended after \d+ of 300000 bytes: try again"),
        (dict(length=1000), "arrived damaged, with the md5 .*, not .*: try again"),
        (dict(md5=b"0" * 16), "arrived damaged, with the md5 .*, not MDAwMDAw.*: try again"),
        (dict(status=503), r"can't be fetched \(HTTP Error 503"),
        (dict(status=404), r"can't be fetched \(HTTP Error 404"),
        (dict(status=403), r"can't be fetched \(HTTP Error 403"),
        (dict(status=304), r"can't be fetched \(HTTP Error 304"),
        (dict(status=206), r"can't be fetched \(the server answers 206\)"),
    ],
)
def test_a_server_that_lies_or_refuses_is_one_line_and_leaves_nothing(
    wrong, problem, server, body, tmp_path, capsys
):
    server.files[PATH] = File(body, **wrong)
    passes = wrong.get("status", 503) == 503
    assert convert.main([NAME, str(tmp_path / "new.npz")]) == (69 if passes else 2)
    assert last_error(capsys).startswith(f"error: {server.address}{PATH} ")
    with pytest.raises(UserError, match=problem):
        pretrained.read(NAME)
    assert not (tmp_path / "new.npz").exists()
    server.files[PATH] = File(body)
    assert fetched(NAME, tmp_path) == body


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"QK" + data[2:]])
def test_a_damaged_copy_is_downloaded_again(change, server, body, tmp_path, caplog):
    server.files[PATH] = File(body)
    copy = pathlib.Path(fetch.locate(NAME, tmp_path))
    copy.write_bytes(change(body))
    assert fetched(NAME, tmp_path) == body
    assert len(server.requests) == 2 and "is damaged: downloading it again" in caplog.text


def test_an_address_is_asked_for_changes(server, body, tmp_path, caplog):
    address = f"{server.address}/w.npz"
    server.files["/w.npz"] = File(body)
    assert fetched(address, tmp_path) == fetched(address, tmp_path) == body
    assert "If-None-Match" in server.requests[1][1] and "If-None-Match" not in server.requests[0][1]
    new = golden_file(tmp_path, "vit_gap_rep").read_bytes()
    server.files["/w.npz"] = File(new)
    assert fetched(address, tmp_path) == new
    server.files["/w.npz"] = File(new, status=503)
    assert fetched(address, tmp_path) == new
    assert "HTTP Error 503" in caplog.text and "using the copy in" in caplog.text
    server.files["/w.npz"] = File(new, status=404)
    with pytest.raises(UserError, match="HTTP Error 404"):
        fetched(address, tmp_path)


def test_without_network_the_copy_is_used(server, tmp_path, caplog):
    folder = golden_folder(tmp_path, "hf_vit")
    for file in folder.iterdir():
        server.files[f"/hf_vit/{file.name}"] = File(file.read_bytes())
    address = f"{server.address}/hf_vit"
    wanted = pretrained.read(address)
    assert wanted.fields == pretrained.read(folder).fields
    server.shutdown()
    server.server_close()
    assert pretrained.read(address).fields == wanted.fields
    assert "using the copy in" in caplog.text
    with pytest.raises(Unavailable, match=rf"^{server.address}{PATH} can't be fetched \("):
        pretrained.read(NAME)


def test_an_address_with_a_query_is_not_kept(server, body, tmp_path):
    server.files["/w.npz?sig=s3cret"] = File(body)
    assert pretrained.read(f"{server.address}/w.npz?sig=s3cret").path.endswith("/w.npz?...")
    assert not (tmp_path / "cache").exists()


def test_a_page_in_place_of_weights_is_not_kept(server, body, tmp_path):
    server.files[PATH] = File(b"<html>sign in first</html>")
    with pytest.raises(UserError, match="it has another format"):
        pretrained.read(NAME)
    server.files[PATH] = File(body)
    assert fetched(NAME, tmp_path) == body


def test_a_cache_that_cannot_be_written_is_said(server, body, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    server.files[PATH] = File(body)
    assert fetched(NAME, tmp_path) == body
    assert "can't be used" in caplog.text and "set VIT_JAX_CACHE" in caplog.text


def test_two_processes_download_once(server, body, tmp_path, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    server.files[PATH] = File(body)
    server.gate = threading.Event()
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(fetched(NAME, tmp_path / str(i))))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    while "waiting for it" not in caplog.text and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    server.gate.set()
    for thread in threads:
        thread.join()
    assert found == [body, body] and len(server.requests) == 1


def test_crc32c_is_checked_where_there_is_no_md5(server, body, tmp_path):
    path = tmp_path / "w.npz"
    path.write_bytes(b"123456789")
    assert transfer.checksum(path, "crc32c") == "4waSgw=="  # the check value of CRC-32C, e3069283
    server.files[PATH] = File(body, headers=(("x_goog_hash", "crc32c=AAAAAA=="),))
    with pytest.raises(Unavailable, match=r"with the crc32c .*, not AAAAAA=="):
        fetched(NAME, tmp_path)


def test_a_long_download_says_so(server, body, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "vit_jax")
    monkeypatch.setattr(progress, "QUIET_S", -1)
    server.files[PATH] = File(body)
    assert fetched(NAME, tmp_path) == body
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("downloading")]
    assert lines == [f"downloading {server.address}{PATH} (0.2 MiB)"]


def test_a_terminal_shows_a_bar(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    monkeypatch.setattr(progress, "QUIET_S", -1)
    screen = io.StringIO()

    def terminal(stderr):
        return Console(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr(progress, "Console", terminal)
    with progress.Download("https://HOST/[b]x.npz", 4_000_000, 1_000_000) as shown:
        shown.advance(1_000_000)
        shown.bar.refresh()
    assert "[b]x.npz" in screen.getvalue() and "1.9/3.8 MiB" in screen.getvalue()
    assert not caplog.text


@pytest.mark.slow
def test_evaluation_takes_a_name(server, tmp_path, capsys):
    sizes = dict(width=32, depth=1, mlp_dim=64, num_heads=4, pool="gap")
    model = vit_jax.create_model("Ti/4", num_classes=10, image_size=8, **sizes)
    params = jax.jit(model.init)(jax.random.key(1), np.zeros((1, 8, 8, 3)))["params"]
    np.savez(tmp_path / "w.npz", **scan_layout.flatten(params))
    server.files[PATH] = File((tmp_path / "w.npz").read_bytes())
    words = [f"--config={ROOT}/configs/evaluate.py:digits", f"--config.init_from={NAME}"]
    assert evaluate.main([*words, "--config.evals.test.data.split=val"]) == 0
    assert '"eval/test/count": 360' in capsys.readouterr().out and len(server.requests) == 1


def test_a_page_leaves_the_earlier_copy(server, body, tmp_path):
    address = f"{server.address}/w.npz"
    server.files["/w.npz"] = File(body)
    copy = pathlib.Path(fetch.locate(address, tmp_path))
    server.files["/w.npz"] = File(b"<html>sign in first</html>")
    with pytest.raises(UserError, match=r"is not a \.npz file, .* the earlier copy stays"):
        fetch.locate(address, tmp_path)
    assert copy.read_bytes() == body
    server.files["/w.npz"] = File(body, status=503)
    assert fetched(address, tmp_path) == body
