"""A model of the user's own may listen too: over HTTP, told before, and never needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from fsdp_sim.cli.drill import drill
from fsdp_sim.learn.drill.listening.endpoint import URL, Endpoint, EndpointError, endpoint
from fsdp_sim.learn.drill.listening.follow import Conversation
from fsdp_sim.learn.drill.spoken import spoken

SOURCE = spoken()["walk_through_a_step"]
SAID = "A scale-free circus of tensors, so to speak."


class Served:
    """A server whose reply the test sets, and what it received."""

    def __init__(self) -> None:
        self.status, self.body, self.wait_s = 200, b"", threading.Event()
        self.hangs = False
        self.received: list[tuple[str, dict[str, str], Any]] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.received.append((self.path, dict(self.headers), body))
                if served.hangs:
                    served.wait_s.wait(10)
                self.send_response(served.status)
                self.send_header("Location", "http://127.0.0.1:9/")
                self.end_headers()
                self.wfile.write(served.body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def says(self, content: str) -> None:
        self.body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Served()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.wait_s.set()
    made.server.shutdown()
    made.server.server_close()


def test_it_hears_what_words_alone_do_not_and_only_by_the_answers_own_words(served: Served) -> None:
    served.says('Here: {"a": "circus of tensors", "b": "words that nobody said", "z": "so", "c": 5}')
    talk = Conversation(SOURCE, endpoint=Endpoint(served.url, "mine", "secret"))
    spoke = talk.say(SAID)
    assert {place: quote.text for place, quote in spoke.made.items()} == {0: "circus of tensors"}
    path, headers, body = served.received[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert set(body) == {"model", "messages", "temperature"}
    sent = json.loads(body["messages"][1]["content"])
    assert set(sent) == {"question", "points", "answer"}
    assert (sent["question"], sent["answer"]) == (SOURCE.question, SAID)


@pytest.mark.parametrize("status", [302, 401, 500])
def test_where_it_fails_words_alone_decide_and_a_sentence_says_so(served: Served, status: int) -> None:
    served.status = status
    talk = Conversation(SOURCE, endpoint=Endpoint(served.url))
    spoke = talk.say("The parameters of a unit are all-gathered before its forward.")
    assert 0 in spoke.made
    assert f"{served.url} did not answer" in spoke.note
    assert "heard without it" in spoke.note


def test_an_answer_that_is_no_list_and_one_that_never_comes_are_errors(served: Served) -> None:
    served.says("I am not sure.")
    with pytest.raises(EndpointError, match="no list of points"):
        Endpoint(served.url).listen(SOURCE, SAID)
    served.hangs = True
    with pytest.raises(EndpointError, match="did not answer"):
        Endpoint(served.url, timeout_s=0.2).listen(SOURCE, SAID)


def test_it_is_off_unless_named_and_told_before(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert endpoint() is None
    assert "is also sent" not in CliRunner().invoke(drill, ["mock"], input="q\n").output
    shown = CliRunner().invoke(drill, ["mock", "--endpoint", served.url], input="q\n").output
    assert f"Each answer is also sent to {served.url}" in shown
    assert served.received == []
    monkeypatch.setenv(URL, "file:///etc/passwd")
    with pytest.raises(ValueError, match="no URL of an endpoint"):
        endpoint()
    assert CliRunner().invoke(drill, ["mock"], input="q\n").exit_code == 2
