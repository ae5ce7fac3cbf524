"""The inference server.

In reading order: app, wire.
"""
