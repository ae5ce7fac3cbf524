"""An agent program of one attempt that asks the policy once, waits while a file exists, asks again and answers;
asked to answer at once, it does not wait.

    python held_agent.py INSTRUCTION FILE

Its key decides whether the answer is right, so that attempts of a group differ.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

from tests.rl.shell_agent import complete

HELD_S = 300.0

messages = [{"role": "user", "content": sys.argv[1]}]
messages.append(complete(messages))
until_s = time.monotonic() + HELD_S
while Path(sys.argv[2]).exists() and "at once" not in sys.argv[1] and time.monotonic() < until_s:
    time.sleep(0.05)
# Not the same request again, which a gateway that restarted meanwhile may take for a retry of the first.
messages.append({"role": "user", "content": "Go on."})
complete(messages)
is_right = hashlib.sha256(os.environ["OPENAI_API_KEY"].encode()).digest()[0] % 2
print(sys.argv[1].split()[-1] if is_right else "wrong")
