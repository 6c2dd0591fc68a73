"""`serve`: the front end of the puzzle in a page of its own, on loopback, for whoever has no notebook open.

``puzzle.js`` gets a model like anywidget's whose messages go by fetch. Only who has the token of the address is
answered, and only under the name of this machine's loopback, so that no page of another
site reaches it by a name of its own.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from fsdp_sim.learn.puzzle.session import PuzzleSession
from fsdp_sim.learn.puzzle.widget import HERE, css

MOST_BYTES = 2**16  # of a message; an order of the largest level has a few hundred
HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fsdp_sim: the schedule puzzle</title><link rel="stylesheet" href="puzzle.css">
<style>:root{color-scheme:light dark}body{margin:24px auto;max-width:1180px;padding:0 16px}</style>
<main id="puzzle"></main><script type="module" src="page.js"></script></html>"""
PAGE_JS = """import puzzle from "./puzzle.js";
const heard = [];
let state = await (await fetch("state")).json();
const model = {
  get: () => state,
  on: (name, call) => heard.push(call),
  off: () => {},
  send: async (message) => {
    const body = JSON.stringify(message);
    try {
      const answer = await fetch("take", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      state = await answer.json();
    } catch {
      state = { ...state, refused: "The puzzle's server does not answer; start fsdp-sim puzzle again." };
    }
    heard.forEach((call) => call());
  },
};
puzzle.render({ model, el: document.getElementById("puzzle") });
"""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'"


class Server(ThreadingHTTPServer):
    """Serves one session at ``url``.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, session: PuzzleSession, port: int = 0) -> None:
        self.session, self.token, self.turns = session, secrets.token_urlsafe(24), threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10

    def do_GET(self) -> None:
        texts = {
            "": ("text/html", HTML),
            "page.js": ("text/javascript", PAGE_JS),
            "puzzle.js": ("text/javascript", (HERE / "puzzle.js").read_text(encoding="utf-8")),
            "puzzle.css": ("text/css", css()),
        }
        asked = self._asked()
        if asked == "state":
            with self.server.turns:
                self._json(self.server.session.state)
        elif asked in texts:
            self._answer(200, *texts[asked])
        elif asked is not None:
            self._answer(404, "text/plain", f"there is no {asked[:60]!r} here")

    def do_POST(self) -> None:
        if (asked := self._asked()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if asked != "take" or self.headers.get_content_type() != "application/json":
            self._answer(404, "text/plain", "messages go to take, as application/json")
        elif not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._answer(413, "text/plain", f"a message must say its length, at most {MOST_BYTES} bytes")
        else:
            data = self.rfile.read(int(length))
            with self.server.turns:
                try:
                    message = msgspec.json.decode(data)
                except (ValueError, RecursionError):
                    message = None
                self._json(self.server.session.take(message))

    def _asked(self) -> str | None:
        """What stands behind the token; None where the request has been refused."""
        port = self.server.server_port
        first, _, rest = self.path.removeprefix("/").partition("/")
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", "this server answers on loopback alone")
        elif not hmac.compare_digest(first.encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "the address lacks the token that fsdp-sim puzzle printed")
        else:
            return rest.partition("?")[0]
        return None

    def _json(self, value: dict[str, Any]) -> None:
        self._answer(200, "application/json", json.dumps(value))

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"), ("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the token stands in every line."""
