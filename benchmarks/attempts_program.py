"""The agent program of attempts.py: one chat completion, with as little besides as Python allows.

python -I -S benchmarks/attempts_program.py             URL and key in its environment
"""

import os
import socket

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'


def main() -> None:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    if b" 200 " not in answer[:20]:
        raise SystemExit(answer[:200].decode(errors="replace"))
    print("9A")


if __name__ == "__main__":
    main()
