"""A hub on this machine's loopback: repositories as dicts of files, served as huggingface_hub asks for them, and told to refuse
or to be busy. `served(monkeypatch, folder)` is the fixture's body: a Hub, and a cache of its own in `folder`."""
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REFUSAL = {"gated": (403, "GatedRepo", "Access to model is restricted. You must be authenticated to access it."),
           "private": (401, "RepoNotFound", "Invalid username or password.")}


class Hub(ThreadingHTTPServer):
    """repos: {id: {revision: {file: bytes}}}, data sets as datasets/owner/name. refused: {id: a word of REFUSAL}. busy: the status
    and headers of the next answers, in order. asked: (method, path) of each request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.refused, self.busy, self.asked = {}, {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass  # a client that went away

    def commit(self, repo, revision):
        """(The commit that a branch, a tag or a commit stands for, its files); (None, None) for none."""
        for name, files in self.repos[repo].items():
            sha = hashlib.sha1(f"{repo}{name}{sorted(files)}".encode()).hexdigest()
            if revision in (name, sha):
                return name if re.fullmatch("[0-9a-f]{40}", name) else sha, files
        return None, None

    def downloads(self, file):
        """How often a file was downloaded."""
        return sum(method == "GET" and path.endswith(f"/{file}") for method, path in self.asked)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+(?:/pr/\d+)?))?", path)
        file = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not api and not file:
            return self.reply(404)  # the library asks for more than repositories
        if hub.busy:
            status, headers = hub.busy.pop(0)
            return self.reply(status, b"{}", headers)
        repo = file[1] if file else f"{'datasets/' * (api[1] == 'datasets')}{api[2]}"
        if repo in hub.refused or repo not in hub.repos:
            status, code, words = REFUSAL[hub.refused.get(repo, "private")]
            return self.reply(status, b"", {"X-Error-Code": code, "X-Error-Message": words})
        sha, files = hub.commit(repo, file[2] if file else api[4] or "main")
        if sha is None:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        if file:
            return self.file(files, file[3], sha)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        if api[3] == "tree":
            found = [{"type": "file", "path": name, "size": len(c), "oid": digests[name][:40],
                      "lfs": {"oid": digests[name], "size": len(c), "pointerSize": 1}} for name, c in files.items()]
        else:
            found = {"id": repo.removeprefix("datasets/"), "sha": sha,
                     "siblings": [{"rfilename": name, "size": len(c),
                                   "lfs": {"sha256": digests[name], "size": len(c), "pointerSize": 1}} for name, c in files.items()]}
        self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def file(self, files, name, sha):
        if name not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"', "X-Repo-Commit": sha}
        self.reply(200, files[name], headers)


@contextmanager
def served(monkeypatch, folder):
    """A running Hub that this process's huggingface_hub asks, which keeps what it gets in `folder`."""
    from plumbing import hub as client

    from huggingface_hub import constants

    hub = Hub()
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    for name, value in {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
                        "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    client.download.cache_clear()
    monkeypatch.setattr(client, "COMMITS", {})
    try:
        yield hub
    finally:
        client.download.cache_clear()
        hub.shutdown()
        hub.server_close()
