"""A dataset hub on loopback, as much of one as `datasets` asks for when it streams; it can be told to misbehave."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: dict[str, bytes], repository: str = "me/texts") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.repository = files, repository
        self.sha = hashlib.sha1(b"".join(files.values())).hexdigest()
        self.drops = 0  # how many of the next answers with file contents stop in their middle
        self.hangs = threading.Event()  # set: contents are announced and never sent
        self.asked: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, sent: int | None = None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        self.close_connection = True

    def entry(self, name: str) -> dict:
        oid = hashlib.sha1(self.server.files[name]).hexdigest()
        return {"type": "file", "path": name, "size": len(self.server.files[name]), "oid": oid}

    def tree(self, prefix: str) -> list[dict]:
        """The files right under a folder, and its folders; of everything below when that is asked for."""
        names = [name for name in self.server.files if name.startswith(prefix)]
        if "recursive=true" in self.path.lower():
            return [self.entry(name) for name in names]
        folders = {prefix + name.removeprefix(prefix).split("/")[0] for name in names if "/" in name[len(prefix) :]}
        return [self.entry(name) for name in names if "/" not in name[len(prefix) :]] + [
            {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in sorted(folders)
        ]

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.route(body)

    def do_GET(self) -> None:
        self.route(b"")

    do_HEAD = do_GET

    def route(self, body: bytes) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked[f"{self.command} {path}"] += 1
        api, files = f"/api/datasets/{hub.repository}", f"/datasets/{hub.repository}/resolve/"
        revision = path.removeprefix(api).partition("/revision/")[2]
        if revision not in ("", "main", hub.sha):
            self.answer(b'{"error": "Invalid rev id"}', 404, {"X-Error-Code": "RevisionNotFound"})
        elif path == api or re.fullmatch(re.escape(api) + "/revision/[^/]+", path):
            info = {"id": hub.repository, "sha": hub.sha, "siblings": [{"rfilename": name} for name in hub.files]}
            self.answer(json.dumps({**info, "private": False, "gated": False, "tags": [], "downloads": 0}).encode())
        elif path.startswith(f"{api}/tree/"):
            folder = "/".join(path.removeprefix(f"{api}/tree/").split("/")[1:])
            self.answer(json.dumps(self.tree(f"{folder}/" if folder else "")).encode())
        elif path.startswith(f"{api}/paths-info/"):
            asked = re.findall("paths=([^&]+)", unquote(body.decode()))
            asked = json.loads(body)["paths"] if body.startswith(b"{") else asked
            self.answer(json.dumps([self.entry(n) for n in asked if n in hub.files]).encode())
        elif path.startswith(files) and path.removeprefix(files).partition("/")[2] in hub.files:
            self.contents(path.removeprefix(files).partition("/")[2])
        else:
            self.answer(b'{"error": "not found"}', 404, {"X-Error-Code": "EntryNotFound"})

    def contents(self, name: str) -> None:
        whole = self.server.files[name]
        headers = {"ETag": f'"{self.entry(name)["oid"]}"', "X-Repo-Commit": self.server.sha, "Accept-Ranges": "bytes"}
        part, status = whole, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(wanted[1]), min(int(wanted[2] or len(whole)), len(whole) - 1)
            part, status = whole[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{end}/{len(whole)}"
        if self.command == "GET" and self.server.hangs.is_set():
            self.answer(part, status, headers, sent=0)
            threading.Event().wait(60)
            return
        drop = self.command == "GET" and self.server.drops > 0
        if drop:
            self.server.drops -= 1
        self.answer(part, status, headers, sent=len(part) // 2 if drop else None)


@contextmanager
def serving(files: dict[str, bytes], repository: str = "me/texts") -> Iterator[Hub]:
    hub = Hub(files, repository)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
