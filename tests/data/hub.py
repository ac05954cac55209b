"""A model hub of one's own: serves folders as repositories, by the protocol that the hub's clients speak."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0" * 39 + "1"


def _handler(repositories: dict[str, Path]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """`repositories`: a folder for each `models/<owner>/<name>` and `datasets/<owner>/<name>`."""

        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def _answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _missing(self, what: str) -> None:
            self._answer(b"{}", 404, X_Error_Code=what, X_Error_Message=what)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                paths = json.loads(sent)["paths"]
            except ValueError:
                paths = parse_qs(sent)["paths"]
            self._api(unquote(urlsplit(self.path).path), [paths] if isinstance(paths, str) else paths)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/"):
                self._api(path, None)
                return
            repository, _, file = path.strip("/").partition("/resolve/")
            if not repository.startswith("datasets/"):
                repository = f"models/{repository}"
            if repository not in repositories:
                self._missing("RepoNotFound")
                return
            found = repositories[repository] / file.partition("/")[2]
            if not found.is_file():
                self._missing("EntryNotFound")
                return
            content, status, headers = found.read_bytes(), 200, {}
            if "Range" in self.headers:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                part = content[int(first) : int(last) + 1 if last else None]
                headers = {"Content_Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
                content, status = part, 206
            self._answer(
                content,
                status,
                ETag=f'"{found.name}"',
                X_Repo_Commit=COMMIT,
                Accept_Ranges="bytes",
                **headers,
            )

        def _api(self, path: str, only: list[str] | None) -> None:
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
            folder = repositories.get(f"{kind}/{owner}/{name}")
            if folder is None:
                self._missing("RepoNotFound")
                return
            below = "/".join(rest[2:]) if rest[:1] == ["tree"] else ""
            files = [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": f.name}
                for f in sorted((folder / below).rglob("*"))
                if f.is_file() and (only is None or str(f.relative_to(folder)) in only)
            ]
            if rest[:1] in (["tree"], ["paths-info"]):
                answer: Any = files
            else:
                siblings = [{"rfilename": file["path"]} for file in files]
                answer = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "private": False}
                answer |= {"tags": [], "downloads": 0, "likes": 0, "disabled": False, "gated": False}
            self._answer(json.dumps(answer).encode(), Content_Type="application/json", X_Repo_Commit=COMMIT)

    return Handler


@contextmanager
def serving(repositories: dict[str, Path]) -> Iterator[str]:
    """The address of a hub that has these repositories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repositories))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
