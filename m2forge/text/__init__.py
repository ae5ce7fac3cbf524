"""Text in tokens: tokenizers, chat formats, and the parser of completions."""
