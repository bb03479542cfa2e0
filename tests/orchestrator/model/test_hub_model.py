import json
import os
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import errors

from mlx_dp.orchestrator.model import hub_model as module
from mlx_dp.orchestrator.model.hub_model import hub_model
from mlx_dp.orchestrator.model.model_directory import ModelSourceError
from tests.support.models.silent_progress import SilentProgress

COMMIT = "0" * 39 + "1"
WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": b"the same weights for others",
    "evil.py": b"x",
}

# Run apart, since the hub client reads its endpoint when it is imported.
CLIENT = """
import json, sys
from mlx_dp.orchestrator.model.model_directory import ModelSourceError
from mlx_dp.orchestrator.model.hub_model import hub_model
class Recorder:
    updates = []
    def update(self, *values):
        self.updates.append(values)
try:
    path = hub_model(sys.argv[1], sys.argv[2] or None, Recorder(), code=sys.argv[3] == "code")
    files = sorted(file.name for file in path.iterdir())
    print(json.dumps({"files": files, "last": Recorder.updates[-1:]}))
except ModelSourceError as error:
    print(json.dumps({"error": str(error)}))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as one small repository needs, ``org/name``."""

    # (file, where it starts) of every download, and how often the weights break off half way.
    downloads: list[tuple[str, int]]
    breaks: int

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        path, _, _ = self.path.partition("?")
        repository = "/api/models/org/name"
        if path in (f"{repository}/revision/main", f"{repository}/revision/{COMMIT}", repository):
            self.send({"id": "org/name", "sha": COMMIT, "siblings": []}, body=body)
        elif path == f"{repository}/tree/{COMMIT}":
            self.send([self.entry(name, data) for name, data in FILES.items()], body=body)
        elif path.startswith(repository):
            self.refuse("RevisionNotFound")
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self.send_file(path.rsplit("/", 1)[1], body=body)
        else:
            self.refuse("RepoNotFound")

    def entry(self, name, data):
        return {"type": "file", "path": name, "size": len(data), "oid": sha256(data).hexdigest()}

    def send(self, value, *, body):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def send_file(self, name, *, body):
        data = FILES[name]
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        Hub.downloads.append((name, start))
        if name == "model.safetensors" and Hub.breaks > 0:
            Hub.breaks -= 1
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def refuse(self, code):
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    Hub.downloads, Hub.breaks = [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def fetch(hub, tmp_path):
    def call(name, revision="", code=""):
        environment = {
            **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, "-c", CLIENT, name, revision, code]
        run = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    return call


@pytest.mark.system
def test_a_snapshot_has_the_model_files_and_no_code(fetch):
    answer = fetch("org/name")
    assert answer["files"] == ["config.json", "model.safetensors"]
    total = len(WEIGHTS) + len(FILES["config.json"])
    assert answer["last"] == [["Fetching org/name", total, total]]


@pytest.mark.system
def test_code_is_fetched_for_those_who_trust_it(fetch):
    assert fetch("org/name", code="code")["files"] == [
        "config.json",
        "evil.py",
        "model.safetensors",
    ]


@pytest.mark.system
def test_a_broken_connection_is_tried_again(fetch, tmp_path):
    Hub.breaks = 1
    assert fetch("org/name")["files"] == ["config.json", "model.safetensors"]
    assert [name for name, _ in Hub.downloads].count("model.safetensors") == 2
    blob = tmp_path / "hf/hub/models--org--name/blobs" / sha256(WEIGHTS).hexdigest()
    assert blob.read_bytes() == WEIGHTS


@pytest.mark.system
def test_a_second_start_fetches_only_the_files_that_are_missing(fetch, tmp_path):
    fetch("org/name")
    (tmp_path / "hf/hub/models--org--name/blobs" / sha256(WEIGHTS).hexdigest()).unlink()
    Hub.downloads.clear()
    assert fetch("org/name")["files"] == ["config.json", "model.safetensors"]
    assert Hub.downloads == [("model.safetensors", 0)]


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("org/name", "v9", "--revision 'v9' does not exist in org/name"),
        ("org/other", "", "--model org/other is not on the hub, or is private"),
        ("a/b/c", "", "neither a path that exists nor a hub id"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(fetch, name, revision, words):
    assert words in fetch(name, revision)["error"]


def raising(error):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError.__new__(errors.GatedRepoError), "is gated"),
        (errors.LocalEntryNotFoundError("offline"), "check the network"),
        (RuntimeError("proxy"), r"RuntimeError: proxy\): check the network"),
    ],
)
def test_a_hub_that_cannot_be_had_is_one_sentence(monkeypatch, error, words):
    monkeypatch.setattr(module, "snapshot_download", raising(error))
    with pytest.raises(ModelSourceError, match=words):
        hub_model("org/name", None, SilentProgress())
