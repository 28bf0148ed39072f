"""Weights of a hub on the loopback, with the real client: hf:ORG/NAME, revisions, and what a hub
may refuse.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import servers
from conftest import GOLDEN, ROOT
from huggingface_hub import constants
from huggingface_hub.utils import _http

import vit_jax
from vit_jax.errors import Unavailable, UserError
from vit_jax.weights import load as pretrained
from vit_jax.weights import names, scan_layout
from vit_jax.weights.formats import safetensors_folder

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
FILES = (safetensors_folder.CONFIG, safetensors_folder.PREPROCESSOR, safetensors_folder.WEIGHTS)


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def cdn_path(body: bytes) -> str:
    return f"/cdn/{digest(body)}"


class Handler(servers.Handler):
    """Answers as the hub does: weights are on another host, as on its content network."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        parts = self.path.strip("/").split("/")
        if parts[0] == "cdn":
            return self.send_file(self.server.files[self.path])
        if len(parts) < 5 or parts[2] != "resolve":
            return self.refuse(404, "")
        name = "/".join(parts[:2])
        if name in self.server.refused:
            return self.refuse(*self.server.refused[name])
        revision = "/".join(parts[3:-1])
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return self.refuse(404, "RevisionNotFound")
        if name not in self.server.models:
            return self.refuse(401, "RepoNotFound")
        return self.resolve(name, commit, parts[-1])

    def refuse(self, status: int, code: str, **headers):
        body = b"" if self.command == "HEAD" else b"{}"
        self.answer(status, body, **({"X_Error_Code": code} if code else {}), **headers)

    def resolve(self, name: str, commit: str, file: str):
        body = self.server.models[name].get((commit, file))
        facts = dict(X_Repo_Commit=commit)
        if body is None:
            return self.refuse(404, "EntryNotFound", **facts)
        etag = f'"{digest(body)}"'
        if file.endswith(".safetensors"):
            path = cdn_path(body)
            self.server.files.setdefault(path, servers.File(body, etag=etag))
            facts |= dict(X_Linked_Etag=etag, X_Linked_Size=str(len(body)))
            return self.answer(
                302, Location=f"http://localhost:{self.server.server_port}{path}", **facts
            )
        sent = b"" if self.command == "HEAD" else body
        return self.answer(200, sent, len(body), ETag=etag, **facts)

    def send_file(self, file):
        if "Range" in self.headers:  # this client sends no If-Range: names are those of contents
            self.headers["If-Range"] = file.etag
        super().send_file(file)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub, at which the client looks, and an empty cache."""
    with servers.serving(Handler) as server:
        server.models = {}
        server.refused = {}
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        form = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server


def add(hub, name: str, folder: pathlib.Path, revision: str = "main") -> None:
    files = {(COMMITS[revision], file.name): file.read_bytes() for file in folder.iterdir()}
    hub.models.setdefault(name, {}).update(files)


def assert_same(found, wanted) -> None:
    assert found[0] == wanted[0]
    found, wanted = (scan_layout.flatten(params) for _, params in (found, wanted))
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["hf_vit", "timm_token", "timm_gap"])
def test_models_of_both_libraries_are_those_of_their_folders(name, hub):
    add(hub, f"org/{name}", GOLDEN / name)
    wanted = vit_jax.from_pretrained(GOLDEN / name)
    for spelling in (f"hf:org/{name}", f"hf-hub:org/{name}", f"hf://org/{name}@main"):
        assert_same(vit_jax.from_pretrained(spelling), wanted)
    files = {path.split("/")[-1] for _, path, _ in hub.requests if "/resolve/" in path}
    assert files <= set(FILES)  # and not expected.npz, which is there, too
    assert len([path for path, _ in gets(hub) if "/cdn/" in path]) == 1


def test_names_of_timm_are_those_of_its_organisation(hub):
    add(hub, "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", GOLDEN / "timm_token")
    add(hub, "timm/vit_tiny_patch16_224.augreg_in21k", GOLDEN / "timm_gap")
    name = "vit_tiny_patch16_224"
    assert_same(vit_jax.from_pretrained(name), vit_jax.from_pretrained(GOLDEN / "timm_token"))
    tagged = vit_jax.from_pretrained(f"{name}.augreg_in21k")
    assert_same(tagged, vit_jax.from_pretrained(GOLDEN / "timm_gap"))


def test_a_revision_has_its_own_files(hub):
    add(hub, "org/x", GOLDEN / "timm_token")
    add(hub, "org/x", GOLDEN / "timm_gap", "v1")
    for spelling in ("hf:org/x@v1", f"hf:org/x@{COMMITS['v1']}"):
        assert_same(vit_jax.from_pretrained(spelling), vit_jax.from_pretrained(GOLDEN / "timm_gap"))
    assert vit_jax.from_pretrained("hf:org/x")[0].pool == "tok"


def test_a_model_of_several_files(hub, tmp_path):
    arrays, config, _ = safetensors_folder.read(GOLDEN / "hf_vit")
    names = sorted(arrays)
    index = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        safetensors_folder.write(folder, {name: arrays[name] for name in part})
        file = f"model-0000{number}-of-00002.safetensors"
        add(hub, "org/x", folder)
        hub.models["org/x"][COMMITS["main"], file] = hub.models["org/x"].pop(
            (COMMITS["main"], "model.safetensors")
        )
        index |= dict.fromkeys(part, file)
    texts = {"config.json": config, safetensors_folder.INDEX: dict(weight_map=index)}
    for file, value in texts.items():
        hub.models["org/x"][COMMITS["main"], file] = json.dumps(value).encode()
    wanted = vit_jax.from_pretrained(GOLDEN / "hf_vit")
    found = scan_layout.flatten(vit_jax.from_pretrained("hf:org/x")[1])
    for name, value in scan_layout.flatten(wanted[1]).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    del hub.models["org/x"][COMMITS["main"], "model-00002-of-00002.safetensors"]
    hub.models["org/y"] = hub.models.pop("org/x")
    with pytest.raises(UserError, match=r"hf:org/y has no model-00002-of-00002\.safetensors"):
        vit_jax.from_pretrained("hf:org/y")


def test_a_download_that_breaks_off_is_continued(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    add(hub, "org/x", GOLDEN / "timm_token")
    body = (GOLDEN / "timm_token/model.safetensors").read_bytes()
    file = servers.File(body, etag=f'"{digest(body)}"', breaks_at=(1000, 20_000))
    hub.files[cdn_path(body)] = file
    for _ in range(2):  # clients before 2.0 continue with the next command only
        with contextlib.suppress(Unavailable):
            pretrained.read("hf:org/x")
    found = vit_jax.from_pretrained("hf:org/x")
    assert_same(found, vit_jax.from_pretrained(GOLDEN / "timm_token"))
    ranges = [headers.get("range") for path, headers in gets(hub) if path == cdn_path(body)]
    assert ranges == [None, "bytes=1000-", "bytes=20000-"]


def gets(hub) -> list[tuple[str, dict[str, str]]]:
    """(path, headers) of all GETs."""
    return [
        (path, {name.lower(): value for name, value in headers.items()})
        for method, path, headers in hub.requests
        if method == "GET"
    ]


def test_what_is_in_the_cache_needs_no_network(hub):
    add(hub, "org/x", GOLDEN / "timm_token")
    wanted = vit_jax.from_pretrained("hf:org/x")
    hub.refused["org/x"] = (503, "")
    assert_same(vit_jax.from_pretrained("hf:org/x"), wanted)
    with pytest.raises(Unavailable, match=r"/org/z can't be fetched \(.*\): check network"):
        hub.refused["org/z"] = (503, "")
        vit_jax.from_pretrained("hf:org/z")


def test_a_hub_that_cannot_be_reached_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    with pytest.raises(Unavailable, match=r" https://.*/org/x can't be fetched \(.*\): check net"):
        vit_jax.from_pretrained("hf:org/x")


@pytest.mark.parametrize(
    ("refusal", "problem"),
    [
        ((401, "GatedRepo"), r"needs access \(.*\): ask for it at http.*/org/x, and log in"),
        ((403, ""), r"needs access \(.*\): ask for it at http.*/org/x, and log in"),
        ((401, "RepoNotFound"), r"does not exist at http.*/org/x, or is private: check the name"),
        ((404, "RepoNotFound"), r"does not exist at http.*/org/x, or is private: check the name"),
        ((404, "RevisionNotFound"), r"has no such revision at http.*/org/x: give a branch"),
        ((418, ""), r"http.*/org/x can't be fetched \(.*418.*\): check network"),
    ],
)
def test_a_refusal_is_one_line_with_the_address(refusal, problem, hub):
    hub.refused["org/x"] = refusal
    with pytest.raises(UserError, match=problem) as error:
        pretrained.read("hf:org/x@v1")
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    assert "hf:org/x@v1" in str(error.value)


def test_pickles_are_not_fetched(hub):
    hub.models["org/x"] = {(COMMITS["main"], "config.json"): b"{}"}
    hub.models["org/x"][COMMITS["main"], "pytorch_model.bin"] = b"\x80"
    with pytest.raises(UserError, match=r"hf:org/x has no model\.safetensors \(PyTorch pickles"):
        vit_jax.from_pretrained("hf:org/x")
    assert not any("pytorch_model" in path for _, path, _ in hub.requests)


def test_offline_without_a_copy_says_so(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(UserError, match=r"is not in the cache .*HF_HUB_OFFLINE is set: unset it"):
        vit_jax.from_pretrained("hf:org/x")
    monkeypatch.undo()
    huggingface_hub.close_session()


def test_the_page_of_a_model_is_its_name():
    page = "https://huggingface.co/google/vit-base-patch16-224"
    assert names.of_page(page) == names.of_page(f"{page}/") == "hf:google/vit-base-patch16-224"
    assert names.of_page(f"{page}/tree/refs/pr/3") == "hf:google/vit-base-patch16-224@refs/pr/3"
    file = names.of_page(f"{page}/blob/main/model.safetensors")
    assert file == f"{page}/resolve/main/model.safetensors"
    assert names.of_page(f"{page}/resolve/main") == f"{page}/resolve/main"


@pytest.mark.parametrize("name", ["hf:", "hf:x", "hf:a/b/c", "hf:a/b@", "hf:a/b@x y", "hf:../b"])
def test_other_forms_are_explained(name):
    with pytest.raises(UserError, match=f"{name} is not the name of a model of the hub: write hf:"):
        pretrained.read(name)


@pytest.mark.slow
def test_a_command_takes_a_name_of_a_hub_that_the_environment_gives(hub, tmp_path):
    add(hub, "org/x", GOLDEN / "hf_vit")
    variables = os.environ | dict(HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "home"))
    words = [sys.executable, "-m", "vit_jax.convert", "hf:org/x", str(tmp_path / "new")]
    done = subprocess.run(
        [*words, "--format=hf"],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "hf:org/x" not in line]
    assert not any("huggingface" in line or "%" in line for line in lines), done.stderr
    assert (tmp_path / "home/hub/models--org--x").exists()
