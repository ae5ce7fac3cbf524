"""An agent: it pays an amount with the coins that the policy names, one a turn, and prints them.

It knows nothing of training: the policy is an address and a key of OpenAI's chat completions.
"""

import json
import os
import sys
import urllib.request

MAX_COINS = 12


def ask(messages: list[dict[str, str]]) -> str:
    body = {"model": os.environ["M2FORGE_MODEL"], "messages": messages, "max_tokens": 16}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return str(json.load(response)["choices"][0]["message"]["content"] or "")


def pay(instruction: str) -> list[str]:
    messages = [{"role": "user", "content": instruction}]
    coins: list[str] = []
    left = int(instruction.removeprefix("Pay ").removesuffix("."))
    while left > 0 and len(coins) < MAX_COINS:
        coin = ask(messages)
        coins.append(coin)
        if not coin.isdecimal():
            break
        left -= int(coin)
        messages += [{"role": "assistant", "content": coin}, {"role": "user", "content": f"{left} left."}]
    return coins


if __name__ == "__main__":
    print(*pay(sys.argv[1]))
