"""A small server that speaks the JSON API of Google Cloud Storage, as far as gcsfs and tensorstore use it.

It has what the storage of checkpoints depends on: objects that appear whole, and generations, so that a write
or read on a condition is one. `python -m tests.train.checkpoint.bucket` starts one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET, FORBIDDEN = "bucket", "forbidden"

Objects = dict[str, tuple[int, bytes]]
"""The generation and the content of each object, by its name."""


class Handler(BaseHTTPRequestHandler):
    """Answers one request; the objects of the only bucket are those of the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet: the second of two would wait for an acknowledgement
    server: Server

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_DELETE = do_GET

    def answer(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b/(\w+)(/o)?(?:/([^/]+))?(?:/moveTo/o/(.+))?", url.path
        )
        if found and found[2] == FORBIDDEN:
            return self.reply(401, {"error": {"message": "no access"}})
        if not found or found[2] != BUCKET:
            return self.reply(404)
        name = unquote(found[4]) if found[4] else query.get("name", "")
        with self.server.lock:
            if self.command == "POST" and not found[5]:
                self.upload(name, body, query)
            elif not found[3]:
                self.reply(200, {"name": BUCKET})
            elif not found[4]:
                self.reply(200, listing(self.server.objects, query))
            elif name not in self.server.objects:
                self.reply(404)
            elif found[5]:
                self.server.put(unquote(found[5]), self.server.objects.pop(name)[1])
                self.reply(200, about(unquote(found[5]), self.server.objects))
            elif self.command == "DELETE":
                del self.server.objects[name]
                self.reply(204)
            elif query.get("alt") == "media" or found[1]:
                self.read(name, query)
            else:
                self.reply(200, about(name, self.server.objects))

    def upload(self, name: str, body: bytes, query: dict[str, str]) -> None:
        if query["uploadType"] == "resumable" and "content" not in query:  # the content follows in one piece
            return self.reply(200, headers={"Location": f"{self.server.url}{self.path}&content"})
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != self.server.objects.get(name, (0,))[0]:
            return self.reply(412)
        self.server.put(name, body)
        self.reply(200, about(name, self.server.objects))

    def read(self, name: str, query: dict[str, str]) -> None:
        generation, content = self.server.objects[name]
        headers = {"x-goog-generation": str(generation)}
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.reply(304, headers=headers)
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self.reply(412)
        if part := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            start = int(part[1]) if part[1] else max(0, len(content) - int(part[2]))
            stop = min(len(content), int(part[2]) + 1) if part[1] and part[2] else len(content)
            if start >= stop:
                return self.reply(416)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self.reply(206, content[start:stop], headers)
        self.reply(200, content, headers)

    def reply(self, status: int, content: object = b"", headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: Objects = {}
        self.lock = threading.Lock()
        self.generations = itertools.count(1)

    def handle_error(self, *_: object) -> None:
        """Of two requests side by side gcsfs drops the one that it no longer needs."""

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = (next(self.generations), content)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which gcsfs and tensorstore find it."""
        return {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}


def about(name: str, objects: Objects) -> dict[str, object]:
    generation, content = objects[name]
    return {
        "name": name,
        "bucket": BUCKET,
        "generation": str(generation),
        "metageneration": "1",
        "size": str(len(content)),
    }


def listing(objects: Objects, query: dict[str, str]) -> dict[str, object]:
    """Objects, and what are folders with a delimiter, from a prefix on or in a range."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items, folders = [], set()
    for name in sorted(objects):
        if not name.startswith(prefix) or not query.get("startOffset", "") <= name:
            continue
        if "endOffset" in query and name >= query["endOffset"]:
            continue
        first, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        if found:
            folders.add(prefix + first + found)
        else:
            items.append(about(name, objects))
    return {"items": items, "prefixes": sorted(folders)}


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server with an empty bucket."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    with serving() as running:
        print(
            *(f"export {name}={value}" for name, value in running.environment.items()), sep="\n", flush=True
        )
        threading.Event().wait()
