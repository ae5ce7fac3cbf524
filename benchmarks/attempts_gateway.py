"""The gateway of attempts.py in its own process, over a scripted engine.

python benchmarks/attempts_gateway.py JOURNAL ADMIN_KEY        prints its URL
"""

import asyncio
import sys

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.server import GatewayServer
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.tokenizer import Tokenizer, train_tokenizer

CONTEXT = 4096


def make_tokenizer() -> Tokenizer:
    return train_tokenizer(
        ["Start at 3G. Follow 2 links. Look up a key. Hi, hello there."] * 8, 300, MINIMAX_M2_SPECIALS
    )


async def serve(journal: str, admin_key: str) -> None:
    format = make_format("minimax_m2", make_tokenizer())
    engine = ScriptedEngine(format.tokenizer.vocab_size, context=CONTEXT)
    config = GatewayConfig(port=0, journal=journal)
    async with GatewayServer(engine, format, config, context=CONTEXT, admin_key=admin_key) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
