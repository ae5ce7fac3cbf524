"""Fast paths behind plain functions, each beside the torch reference it must equal."""
