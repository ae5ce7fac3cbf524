"""Commands in isolation: run to their end or fed as workers, behind the protocol `Sandbox`."""
