"""Serves agents' completion requests in their SDKs' dialects, samples from an engine and records every token."""
