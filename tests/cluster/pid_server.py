"""Answers every connection on an inherited socket with the number of its process."""

import os
import socket
import sys

with socket.socket(fileno=int(sys.argv[1])) as listener:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(str(os.getpid()).encode())
