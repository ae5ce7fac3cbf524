"""The chat format of the gateway's conversations: a model folder and the gateway's config in, a chat format out."""

from pathlib import Path

from m2forge.gateway.config import GatewayConfig
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.rewrite import check_rewrites
from m2forge.text.tokenizer import load_tokenizer

_COST = (
    "then the recorded conversation branches (divergence `template`): the rewritten messages and what follows are "
    "encoded and prefilled again, and the sampled tokens stay in the branch before"
)


def load_format(folder: Path, config: GatewayConfig) -> ChatFormat:
    """Logs it if the format rewrites its prefix, or raises FormatError if the config refuses that."""
    format = make_format(config.format, load_tokenizer(folder))
    check_rewrites(format, config.prefix_rewrites, key="gateway.prefix_rewrites", cost=_COST)
    return format
