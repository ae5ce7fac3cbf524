"""An endpoint of chat completions on loopback that responds as it is told and records the requests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[[dict[str, Any], int], tuple[int, bytes]]
"""The body of a request and the number of requests before it in, status and body of the response out."""


def completion(content: str, **choice: object) -> tuple[int, bytes]:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = {"choices": [{"message": message, "finish_reason": "stop", **choice}], "usage": usage}
    return 200, json.dumps(body).encode()


class Endpoint:
    def __init__(self, respond: Respond) -> None:
        self.requests: list[dict[str, Any]] = []
        self.respond = respond
        lock, endpoint = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(endpoint.requests)
                    endpoint.requests.append({**body, "path": self.path, "key": self.headers["authorization"]})
                status, content = endpoint.respond(body, number)
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """The default writes to standard error."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that was killed; the default writes to standard error."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def serving(respond: Respond) -> Iterator[Endpoint]:
    endpoint = Endpoint(respond)
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()
