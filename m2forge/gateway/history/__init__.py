"""Maps a client's messages to recorded tokens.

In reading order: history, turn.
"""
