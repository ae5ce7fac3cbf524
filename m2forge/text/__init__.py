"""Text and tokens: tokenizers, chat formats, and completion parsers."""
