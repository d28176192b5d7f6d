"""The hub's real client against a small hub on localhost: what is fetched, and each way to fail."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from decodekit.errors import CheckpointError
from decodekit.models import hub
from decodekit.models.hub import cached_snapshot, fetch_repo, wanted_files

REPO = "owner/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """Serves one repo with the four requests that the client makes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.refuse_files: tuple[int, str] | None = None
        self.silent = threading.Event()
        self.requests = 0


class _Answers(BaseHTTPRequestHandler):
    server: SmallHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if REPO not in path:  # the client also asks for things that are not of the repo
            self._refuse(404, "")
            return
        self.server.requests += 1
        if self.server.silent.is_set():
            time.sleep(2)
        elif self.server.refusal is not None:
            self._refuse(*self.server.refusal)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in self.server.files.items()
            ]
            self._send(json.dumps(entries).encode())
        elif path.startswith(f"/api/models/{REPO}"):
            siblings = [
                {"rfilename": name, "size": len(data)} for name, data in self.server.files.items()
            ]
            self._send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif self.server.refuse_files is not None:
            self._refuse(*self.server.refuse_files)
        else:
            name = path.partition(f"/{REPO}/resolve/{COMMIT}/")[2]
            if self.command == "GET":
                self.server.fetched.append(name)
            self._send(self.server.files[name], etag=name)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, etag: str = "x") -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with SmallHub() as small:
        threading.Thread(target=small.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{small.server_address[1]}"
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        small.files = dict.fromkeys(
            [
                "config.json",
                "tokenizer.json",
                "model.safetensors",
                "pytorch_model.bin",
                "original/consolidated.00.pth",
                "README.md",
            ],
            b"{}",
        )
        yield small
        small.shutdown()


def fill_cache(*names: str, revision: str = "main") -> Path:
    """Write a snapshot into the hub's cache as another program would leave it."""
    repo = Path(constants.HF_HUB_CACHE) / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def failure(said: list[str], revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        fetch_repo(REPO, name="tiny", revision=revision, log=said.append)
    assert caught.value.model == "tiny"
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("model 'tiny': ")
    return text


def test_only_what_a_model_needs_is_fetched(server: SmallHub, said: list[str]) -> None:
    found = fetch_repo(REPO, name="tiny", log=said.append)
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in found.iterdir()) == names
    assert sorted(server.fetched) == names
    assert said == ["fetching owner/tiny from the hub (0 MB)"]
    asked = server.requests
    assert fetch_repo(REPO, name="tiny", log=said.append) == found
    assert server.requests == asked, "a complete cache needs no network"


def test_an_interrupted_download_is_completed(server: SmallHub, said: list[str]) -> None:
    snapshot = fill_cache("config.json", "tokenizer.json")
    assert fetch_repo(REPO, name="tiny", revision="main", log=said.append) == snapshot
    assert server.fetched == ["model.safetensors"]


def test_bin_is_fetched_where_there_are_no_safetensors(server: SmallHub, said: list[str]) -> None:
    del server.files["model.safetensors"]
    found = fetch_repo(REPO, name="tiny", log=said.append)
    assert (found / "pytorch_model.bin").is_file()


def test_a_repo_without_weights(server: SmallHub, said: list[str]) -> None:
    server.files = {"config.json": b"{}", "model.Q4_0.gguf": b""}
    assert "owner/tiny on the hub lacks weights" in failure(said)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (403, "GatedRepo", "is gated: accept its terms at http://127.0.0.1"),
        (401, "GatedRepo", "then run `hf auth login` (older: `huggingface-cli login`)"),
        (404, "RepoNotFound", "no repo owner/tiny on the hub: check the name at http://127.0.0.1"),
        (404, "RevisionNotFound", "owner/tiny has no such revision; see http://127.0.0.1"),
        (500, "", "the hub refused owner/tiny: HfHubHTTPError: "),
    ],
)
def test_refusals(server: SmallHub, said: list[str], status: int, code: str, text: str) -> None:
    server.refusal = (status, code)
    assert text in failure(said)
    assert server.requests == 1, "no storm of retries"
    assert said == []


def test_a_gated_repo_that_shows_its_list_of_files(server: SmallHub, said: list[str]) -> None:
    server.refuse_files = (403, "GatedRepo")
    assert "owner/tiny is gated: " in failure(said)


def test_a_silent_hub_is_given_up(
    server: SmallHub, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.silent.set()
    monkeypatch.setattr(hub, "_DEADLINE_SECONDS", 0.2)
    assert "cannot be reached (TimeoutError: no answer within 0.2 seconds)" in failure(said)


def test_no_network(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        text = failure(said)
        fill_cache("config.json")
        assert "is only in part in the local hub cache" in failure(said)
    assert "owner/tiny is not in the local hub cache and the hub cannot be reached" in text
    assert "set model.path to a directory" in text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left"), "owner/tiny cannot be saved: OSError"),
        (ConnectionResetError("reset"), "broke off (start again to resume it) and the hub cannot"),
    ],
)
def test_a_download_that_breaks_off(
    server: SmallHub,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    text: str,
) -> None:
    real = huggingface_hub.snapshot_download

    def broken(*args: str, local_files_only: bool = False, **options: object) -> str:
        if local_files_only:
            return str(real(*args, local_files_only=True))
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    assert text in failure(said)


def test_offline_mode_asks_no_hub(
    server: SmallHub, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in failure(said)
    snapshot = fill_cache("config.json", "tokenizer.json", "model.safetensors")
    assert fetch_repo(REPO, name="tiny", log=said.append) == snapshot
    assert server.requests == 0


def test_a_name_that_is_no_hub_id(said: list[str]) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor a hub repo") as caught:
        fetch_repo("a/b/c", name="x", log=said.append)
    assert "\n" not in str(caught.value)


def test_cached_snapshot_by_revision() -> None:
    assert cached_snapshot(REPO) is None
    snapshot = fill_cache("config.json", revision="v1")
    assert cached_snapshot(REPO) is None
    assert cached_snapshot(REPO, "v1") == snapshot


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"],
            ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"],
        ),
        (
            [
                "consolidated.safetensors",
                "adapter_model.safetensors",
                "a.safetensors",
                "model.safetensors.index.json",
                "pytorch_model.bin.index.json",
                "pytorch_model-1.bin",
            ],
            ["a.safetensors", "model.safetensors.index.json"],
        ),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-1.bin", "training_args.bin"],
            ["pytorch_model-1.bin", "pytorch_model.bin.index.json"],
        ),
        (
            ["tokenizer.model", "chat_template.jinja", "merges.txt", "x.tiktoken", "onnx/a.json"],
            ["chat_template.jinja", "merges.txt", "tokenizer.model", "x.tiktoken"],
        ),
        (["consolidated.safetensors", "x.pth", "x.gguf", "logo.png"], []),
    ],
)
def test_wanted_files(names: list[str], wanted: list[str]) -> None:
    assert wanted_files(names) == wanted


def test_the_real_hub_is_given_up_in_time(tmp_path: Path) -> None:
    """Without a network: no hang. With one the repo does not exist, which is as quick."""
    code = (
        "from decodekit.models.hub import fetch_repo\n"
        "fetch_repo('decodekit-test/no-such-model', name='x')\n"
    )
    environment = {"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - start < 15
    assert "CheckpointError: model 'x': " in result.stderr.splitlines()[-1]
