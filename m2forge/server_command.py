"""`m2forge serve` and `m2forge gateway`: a model behind HTTP, with or without recorded episodes.

One function declares a command's arguments, another runs it; it imports what it needs when it runs.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.command_option import add_dry_run, add_revision, add_set
from m2forge.errors import ConfigError
from m2forge.importing import importing

if TYPE_CHECKING:
    from m2forge.protocols import Engine
    from m2forge.rollout.config import ServeConfig

ENGINES = ("native", "m2forge", "vllm", "sglang")


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model folder, GGUF file or hub id to serve")
    add_revision(parser)
    _add_address(parser, 8400)
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="file with the server's API key (default: generate and print one)"
    )
    add_set(parser)
    add_dry_run(parser)


def run_serve(args: argparse.Namespace) -> None:
    from m2forge.config import build
    from m2forge.inference.config import ModelServerConfig
    from m2forge.key import refuse_key_variable

    refuse_key_variable("M2FORGE_ADMIN_KEY", "--key-file")
    server = {"host": args.host, "port": args.port}
    options = {name: value for name, value in server.items() if value is not None}
    config = build(ModelServerConfig, {"server": options}, args.set, origin="serve")
    if args.dry_run:
        from m2forge.dry_run import describe_server, print_dry_run

        print_dry_run({"--set": config}, lambda: describe_server(args.model, args.revision, config))
        return
    key, key_lines = _find_key(args.key_file, "key")
    with importing():
        from m2forge.inference.server import serve

    serve(
        args.model,
        config,
        key,
        lambda url: print(f"serving {args.model} on {url}", *key_lines, sep="\n", flush=True),
        args.revision,
    )


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model folder or hub id: tokenizer, chat format, weights")
    add_revision(parser)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="native",
        help="the inference engine: this process, or a server (default: native)",
    )
    parser.add_argument("--url", metavar="URL", help="URL of that server")
    parser.add_argument("--engine-key-file", type=Path, metavar="FILE", help="file with that server's API key")
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key of the admin routes (default: generate and print one)",
    )
    parser.add_argument(
        "--journal", metavar="DIR", help="folder of the episode journals, from which a restart recovers"
    )
    _add_address(parser, 8500)
    add_set(parser, "override a key of the gateway")
    parser.add_argument(
        "--engine-set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the engine"
    )
    add_dry_run(parser)


def run_gateway(args: argparse.Namespace) -> None:
    from m2forge.config import build
    from m2forge.gateway.config import GatewayConfig
    from m2forge.key import read_key_file, refuse_key_variable
    from m2forge.rollout.config import ServeConfig

    refuse_key_variable("M2FORGE_GATEWAY_ADMIN_KEY", "--admin-key-file")
    refuse_key_variable("M2FORGE_ENGINE_KEY", "--engine-key-file")
    options = {"host": args.host, "port": args.port, "journal": args.journal}
    config = build(GatewayConfig, {k: v for k, v in options.items() if v is not None}, args.set, origin="gateway")
    if (args.engine == "native") != (args.url is None):
        raise ConfigError(
            f"--engine {args.engine}, --url {args.url}: a server needs --url, the native engine takes none"
        )
    if args.engine == "native" and args.engine_key_file is not None:
        raise ConfigError(f"--engine-key-file {args.engine_key_file}: the native engine has no key; leave it out")
    engine = build(ServeConfig, {}, args.engine_set, origin="engine")
    if args.dry_run:
        from m2forge.dry_run import describe_gateway, print_dry_run

        configs = {"--set": config, "--engine-set": engine}
        print_dry_run(
            configs, lambda: describe_gateway(args.model, args.revision, config, engine, args.engine, args.url)
        )
        return
    engine_key = None if args.engine_key_file is None else read_key_file(args.engine_key_file)
    admin_key, key_lines = _find_key(args.admin_key_file, "admin key")
    from m2forge.gateway.format import load_format
    from m2forge.gateway.server import serve_gateway
    from m2forge.model.config_file import read_config
    from m2forge.model.hub import find_folder

    # The folder may hold only the tokenizer if a server samples.
    folder = find_folder(args.model, args.revision, "all" if args.engine == "native" else "tokenizer")
    model = read_config(folder) if args.engine == "native" or (folder / "config.json").exists() else None
    limits = [] if model is None else [model.max_context, engine.rollout.max_context or model.max_context]
    if args.engine == "native":
        limits.append(engine.rollout.num_blocks * engine.rollout.block_tokens)
    serve_gateway(
        load_format(folder, config),
        config,
        lambda: _make_engine(args.engine, folder, Path(args.model).absolute().name, args.url, engine, engine_key),
        lambda url: print(f"gateway to {args.model} on {url}", *key_lines, sep="\n", flush=True),
        admin_key=admin_key,
        context=min(limits, default=None),
        vocab_size=None if model is None else model.vocab_size,
    )


def _add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """`port`: the default, which the config has."""
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"port to listen on (default: {port}; 0: any free port)")


def _find_key(path: Path | None, name: str) -> tuple[str, list[str]]:
    """The key from a file, or a random one; and the lines to print if the user does not know it yet."""
    from m2forge.key import make_key, read_key_file

    if path is not None:
        return read_key_file(path), []
    key = make_key()
    return key, [f"{name}: {key}"]


def _make_engine(kind: str, folder: Path, name: str, url: str, config: "ServeConfig", key: str | None) -> "Engine":
    """`name`: of the weights, unless the config names them."""
    from m2forge.records import PolicyVersion

    version = PolicyVersion(config.lineage or name, config.step, config.branch)
    if kind == "native":
        from m2forge.rollout.engine import NativeEngine
        from m2forge.rollout.server.model_server import make_core

        return NativeEngine(make_core(folder, config, name))
    if kind == "vllm":
        from m2forge.rollout.backends.vllm import VLLMEngine

        return VLLMEngine(url, version, api_key=key)
    if kind == "sglang":
        from m2forge.rollout.backends.sglang import SGLangEngine

        return SGLangEngine(url, version, api_key=key)
    from m2forge.rollout.backends.remote import RemoteEngine

    return RemoteEngine(url, key=key)
