"""As much of the protocols of Google Cloud Storage (XML) and Azure Blob Storage as a store of values needs.

Written after their references, not by their makers: it shows that requests are well formed and replies are
understood, and no more. Neither has an emulator that pip could bring.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import threading
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
PAGE = 100
TIME = "2026-01-01T00:00:00.000Z"

AZURE_ENV = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"k" * 32).decode(),
}


def google_env(url: str) -> dict[str, str]:
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, "private_key_id": ""})}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def do_GET(self):
        path, query = self._target()
        if path == BUCKET:
            self._list(query)
        elif path.startswith(f"{BUCKET}/") and (name := path.partition("/")[2]) in self.server.values:
            self._answer(200, self.server.values[name])
        else:
            self._answer(404)

    def do_PUT(self):
        path, _ = self._target()
        bucket, _, name = path.partition("/")
        data = self._body()
        if bucket != BUCKET:
            self._answer(404)
            return
        self.server.values[name] = data
        self._answer(201 if self.server.azure else 200)

    def do_DELETE(self):
        path, _ = self._target()
        self._body()
        there = self.server.values.pop(path.partition("/")[2], None) is not None
        self._answer((202 if self.server.azure else 204) if there else 404)

    def do_POST(self):
        """A batch of DELETEs, as Azure has it."""
        names = [unquote(name) for name in re.findall(rb"DELETE /bucket/(\S+) HTTP", self._body())]
        gone = [self.server.values.pop(name, None) is not None for name in names]
        parts = [
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            f"HTTP/1.1 {'202 Accepted' if done else '404 Not Found'}\r\n\r\n"
            for number, done in enumerate(gone)
        ]
        body = ("".join(parts) + "--batch--\r\n").encode()
        self._answer(202, body, {"Content-Type": "multipart/mixed; boundary=batch"})

    def log_message(self, *_args): ...

    def _target(self):
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        return unquote(split.path).lstrip("/"), query

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _list(self, query):
        names = sorted(name for name in self.server.values if name.startswith(query.get("prefix", "")))
        start = int(query.get("marker") or query.get("continuation-token") or 0)
        page, more = names[start : start + PAGE], str(start + PAGE) if len(names) > start + PAGE else ""
        write = self._azure_page if self.server.azure else self._google_page
        self._answer(200, write(page, more).encode(), {"Content-Type": "application/xml"})

    def _azure_page(self, names, more):
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}"
            f"</Last-Modified><Etag>e</Etag><Content-Length>{len(self.server.values[name])}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name in names
        )
        return (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
        )

    def _google_page(self, names, more):
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.server.values[name])}</Size>"
            f"<LastModified>{TIME}</LastModified><ETag>e</ETag></Contents>"
            for name in names
        )
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult>{entries}{token}</ListBucketResult>"

    def _answer(self, status, body=b"", headers=None):
        self.send_response(status)
        always = {"ETag": '"e"', "Last-Modified": formatdate(usegmt=True), "Content-Length": str(len(body))}
        for name, value in {**always, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def cloud_server(*, azure: bool):
    """Its URL. It takes any credentials."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.azure, server.values = azure, {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
