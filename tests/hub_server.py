"""A Hub on this machine: the part of its protocol that pushing, listing and loading need, without Xet.

What PyPI offers does not serve: olah mirrors and takes no uploads, hf-local-hub needs a server that its wheel lacks.
The client is the real `huggingface_hub`, told where to go by `HF_ENDPOINT`. Commits are whole or absent, as on the Hub.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_local"


@dataclass
class Repo:
    """Commits hold files by path; the first commit of every repository is empty."""

    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=dict)  # commit -> path -> oid
    heads: dict[str, str] = field(default_factory=dict)  # branch or pull request -> commit
    log: list[tuple[str, str]] = field(default_factory=list)  # (branch, summary)

    def commit(self, branch: str, files: dict[str, str], summary: str) -> str:
        seed = json.dumps([branch, sorted(files.items()), summary, len(self.commits)])
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha], self.heads[branch] = files, sha
        self.log.append((branch, summary))
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.heads.get(revision, revision if revision in self.commits else None)


class Stall:
    """Holds the first request that matches, either before it is served or after; `reached` tells that one is there.

    `body`: read only half of the request's body before stopping there.
    """

    def __init__(self, method: str, pattern: str, after: bool = False, body: bool = False):
        self.method, self.pattern, self.after, self.body = method, re.compile(pattern), after, body
        self.reached, self.released = threading.Event(), threading.Event()

    def matches(self, method: str, path: str) -> bool:
        return not self.reached.is_set() and method == self.method and self.pattern.search(path) is not None

    def wait(self) -> None:
        self.reached.set()
        self.released.wait(60)


class LocalHub:
    """`with LocalHub() as hub:` serves at `hub.url`; `hub.repos` is what it holds."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.stall: Stall | None = None
        self.busy = 0  # requests being served
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.stall:
            self.stall.released.set()
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        held = self.repos[repo]
        return {path: self.blobs[oid] for path, oid in held.commits[held.resolve(revision)].items()}

    def environment(self, home) -> dict[str, str]:
        """The variables of a process that is to use this Hub and keeps its caches under `home`."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    ROUTES = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/repos/create", "create"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ]

    def do_GET(self):
        self._serve("GET")

    def do_HEAD(self):
        self._serve("GET")

    def do_POST(self):
        self._serve("POST")

    def do_PUT(self):
        self._serve("PUT")

    def log_message(self, *_):
        pass

    def _serve(self, method):
        with self.hub.lock:
            self.hub.busy += 1
        try:
            self._serve_one(method)
        finally:
            with self.hub.lock:
                self.hub.busy -= 1

    def _serve_one(self, method):
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append((self.command, url.path))
        stall = self.hub.stall if self.hub.stall and self.hub.stall.matches(self.command, url.path) else None
        length = int(self.headers.get("Content-Length") or 0)
        if stall and stall.body:
            self.rfile.read(length // 2)
            stall.wait()
            self.close_connection = True
            return
        self.body = self.rfile.read(length)
        if len(self.body) < length:
            self.close_connection = True
            return
        if stall and not stall.after:
            stall.wait()
        reply = self._dispatch(method, url.path)
        if stall and stall.after:
            stall.wait()
        try:
            self._reply(*reply)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _dispatch(self, method, path):
        for verb, pattern, name in self.ROUTES:
            found = re.fullmatch(pattern, path)
            if verb == method and found:
                parts = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                with self.hub.lock:
                    return self._route(name, parts)
        return self._missing("EntryNotFound")

    def _route(self, name, parts):
        if "repo" in parts:
            repo = self.hub.repos.get(parts.pop("repo"))
            if repo is None or (repo.private and not self._known()):
                return 401, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
            parts["repo"] = repo
        if name in ("create", "branch", "preupload", "commit", "batch") and not self._known():
            return 401, {}, {"error": "Invalid credentials"}
        return getattr(self, name)(**parts)

    def _known(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _missing(self, code):
        return 404, {"X-Error-Code": code}, {"error": code}

    def _reply(self, status, headers, content):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def whoami(self):
        return (200, {}, {"name": "me", "type": "user", "orgs": []}) if self._known() else (401, {}, {"error": "who?"})

    def validate(self):
        return 200, {}, {"errors": [], "warnings": []}

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        reply = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            return 409, {}, {**reply, "error": "You already created this model repo"}
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(private)
        self.hub.repos[name].commit("main", {}, "initial commit")
        return 200, {}, reply

    def info(self, repo, revision="main"):
        sha = repo.resolve(revision)
        if sha is None:
            return self._missing("RevisionNotFound")
        name = self._name(repo)
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return 200, {}, {"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": siblings}

    def _name(self, repo):
        return next(name for name, held in self.hub.repos.items() if held is repo)

    def tree(self, repo, revision, path=""):
        sha = repo.resolve(revision)
        if sha is None:
            return self._missing("RevisionNotFound")
        prefix = f"{path}/" if path else ""
        files = {name: oid for name, oid in repo.commits[sha].items() if name.startswith(prefix)}
        if path and not files:
            return self._missing("EntryNotFound")
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found = [self._entry(name, oid) for name, oid in files.items() if recursive or "/" not in name[len(prefix) :]]
        folders = {prefix + name[len(prefix) :].split("/")[0] for name in files if "/" in name[len(prefix) :]}
        return 200, {}, found + [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]

    def _entry(self, path, oid):
        entry = {"type": "file", "path": path, "size": len(self.hub.blobs[oid]), "oid": oid[:40]}
        if oid in self.hub.large:
            entry["lfs"] = {"oid": oid, "size": entry["size"], "pointerSize": 130}
        return entry

    def branch(self, repo, revision):
        if revision in repo.heads:
            return 409, {}, {"error": "Reference already exists"}
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repo.heads[revision] = repo.resolve(start)
        return 200, {}, {}

    def preupload(self, repo, revision):
        if repo.resolve(revision) is None:
            return self._missing("RevisionNotFound")
        files = [
            {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False}
            for file in json.loads(self.body)["files"]
        ]
        return 200, {}, {"files": files}

    def batch(self, repo):
        objects = []
        for asked in json.loads(self.body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            objects.append(asked if asked["oid"] in self.hub.blobs else {**asked, "actions": actions})
        return 200, {}, {"transfer": "basic", "objects": objects}

    def put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return 400, {}, {"error": "sha256 mismatch"}
        self.hub.blobs[oid] = self.body
        self.hub.large.add(oid)
        return 200, {}, {}

    def commit(self, repo, revision):
        head = repo.resolve(revision)
        if head is None:
            return self._missing("RevisionNotFound")
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", head) != head:
            return 412, {}, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(repo.commits[head])
        for line in lines[1:]:
            if problem := self._apply(files, line["key"], line["value"]):
                return 400, {}, {"error": problem}
        reply, branch, address = {}, revision, f"{self.hub.url}/{self._name(repo)}"
        if self.query.get("create_pr") == ["1"]:
            branch = f"refs/pr/{sum(name.startswith('refs/pr/') for name in repo.heads) + 1}"
            reply["pullRequestUrl"] = f"{address}/discussions/{branch.rsplit('/', 1)[1]}"
        sha = repo.commit(branch, files, header["summary"])
        return 200, {}, {**reply, "success": True, "commitOid": sha, "commitUrl": f"{address}/commit/{sha}"}

    def _apply(self, files, key, value):
        path = value["path"]
        if key == "file":
            content = base64.b64decode(value["content"])
            oid = hashlib.sha256(content).hexdigest()
            self.hub.blobs.setdefault(oid, content)
            files[path] = oid
        elif key == "lfsFile":
            if value["oid"] not in self.hub.blobs:
                return f"{path} was not uploaded"
            files[path] = value["oid"]
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                return f"{path} is not there"
        else:
            return f"unknown operation {key}"
        return None

    def resolve(self, repo, revision, path):
        sha = repo.resolve(revision)
        if sha is None:
            return self._missing("RevisionNotFound")
        oid = repo.commits[sha].get(path)
        if oid is None:
            status, headers, content = self._missing("EntryNotFound")
            return status, {**headers, "X-Repo-Commit": sha}, content
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        content = self.hub.blobs[oid]
        if oid in self.hub.large:
            headers |= {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return 200, headers, content
        begin, end = int(asked[1]), int(asked[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        return 206, headers, content[begin : end + 1]


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".bin", ".pt")) else "regular"
