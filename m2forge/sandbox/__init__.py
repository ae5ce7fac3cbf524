"""Runs commands in isolation, to completion or as workers with streamed input, behind the protocol `Sandbox`."""
