"""Measures how much a completion mixes languages, from 0 to 1, by the scripts it is written in.

It measures thinking and content without code, formulas and quotations, and ignores tool-call arguments. With home =
"conversation" the expected scripts are those of the user (without a user, of the system message; without any letter
there, each text's own): the dominant one, and any other of at least `home_letters` letters. The share of foreign
letters maps to

    0 up to allowed_share, 1 from full_share on, linear in between.

With the defaults, in a conversation in English: 90 Latin letters and 3 Han characters, which count 9, are no mixing,
since 9 foreign letters are fewer than 12; with 5, which count 15, the share is 15 / 105 and the measure
(15 / 105 − 0.02) / 0.18 = 0.683.
"""

from collections.abc import Sequence
from unicodedata import normalize

from m2forge.reward.config import MixingConfig
from m2forge.reward.prose import prose
from m2forge.reward.script import count_letters, count_written, dominant
from m2forge.text.completion import Completion
from m2forge.text.message import Message


def mixing(completion: Completion, context: Sequence[Message], config: MixingConfig) -> float:
    """`context`: the messages that the completion answers."""
    excess = foreign_share(completion, context, config) - config.allowed_share
    return min(1.0, max(0.0, excess / (config.full_share - config.allowed_share)))


def foreign_share(completion: Completion, context: Sequence[Message], config: MixingConfig) -> float:
    """Foreign letters over all letters; 0 if there are fewer than `min_letters` foreign ones."""
    conversation = _home(context, config) if config.home == "conversation" else frozenset()
    # Without the assistant's own messages: earlier mixing must not excuse later mixing.
    quotable = normalize("NFC", "\n".join(message.content for message in context if message.role != "assistant"))
    num_foreign, num_letters = 0, 0
    for text in map(prose, (completion.thinking, completion.content)):
        letters = count_letters(text)
        home = conversation or _alone(dominant(letters))
        foreign = count_written(text, letters.keys() - home, quotable, config.min_latin_words).total()
        num_foreign += foreign
        num_letters += foreign + sum(letters[script] for script in home)
    return num_foreign / num_letters if num_foreign >= config.min_letters else 0.0


def _home(context: Sequence[Message], config: MixingConfig) -> frozenset[str]:
    """The scripts of the conversation."""
    for role in ("user", "system"):
        text = prose("\n".join(message.content for message in context if message.role == role))
        letters = count_letters(text)
        # Terms in Latin letters may outnumber the rest; they decide only if the text has nothing else.
        written = count_written(text, letters, "", config.min_latin_words)
        main = dominant(written or letters)
        if main is not None:
            return _alone(main) | {script for script, count in written.items() if count >= config.home_letters}
    return frozenset()


def _alone(script: str | None) -> frozenset[str]:
    return frozenset() if script is None else frozenset((script,))
