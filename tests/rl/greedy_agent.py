"""An agent program that is another one, which asks for sampling that nothing could be learnt from.

python greedy_agent.py PROGRAM
"""

import runpy
import sys
from typing import Any

from openai.resources.chat.completions import AsyncCompletions

_create = AsyncCompletions.create


async def create(completions: AsyncCompletions, **fields: Any) -> Any:
    return await _create(completions, **fields | {"temperature": 0, "top_p": 0.5, "seed": 7})


if __name__ == "__main__":
    AsyncCompletions.create = create  # type: ignore[method-assign, assignment]  # the program's own calls
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
