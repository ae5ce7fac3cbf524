"""A real HTTP endpoint with OpenAI's chat completions that responds as a script says."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Respond = Callable[[dict[str, object], str], tuple[int, object]]
"""Maps a request's body and its key to a status and a response."""


def completion(content: str) -> tuple[int, object]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}


@contextlib.contextmanager
def serve(respond: Respond) -> Iterator[str]:
    """The base URL of the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, response = respond(body, self.headers.get("authorization", ""))
            data = json.dumps(response).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
