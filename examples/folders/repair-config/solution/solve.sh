#!/bin/sh
set -e
cat > /workspace/service.json <<'END'
{
    "listen": {"host": "0.0.0.0", "port": 8443, "backlog": 128},
    "timeouts": {"read_s": 7.5, "write_s": 5},
    "features": ["metrics", "tracing", "drain"],
    "greeting": "say \"hello\" // not a comment",
    "pattern": "^[a-z]+\\.example\\.org$",
    "retries": null,
    "verbose": true
}
END
