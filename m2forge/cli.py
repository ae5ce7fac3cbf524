"""The `m2forge` command: arguments in, exit status out.

0 is success; 2 is bad input, explained on standard error with nothing written; 130 is an interrupt. Each command is
one function that imports what it needs when it runs, so that `m2forge --help` loads neither torch nor pydantic.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from m2forge import __version__, plan_command, server_command, tasks_command
from m2forge.command_option import add_dry_run, add_revision, add_set
from m2forge.errors import ConfigError, M2ForgeError, NotFoundError, suggest
from m2forge.importing import importing

if TYPE_CHECKING:
    from m2forge.pretrain.config import PretrainConfig
    from m2forge.rl.config import RLConfig
    from m2forge.sft.config import SFTConfig

    RunConfigT = TypeVar("RunConfigT", PretrainConfig, SFTConfig, RLConfig)

DTYPES = ("bfloat16", "float32", "float16")
BYTES_PER_GB = 10**9
SHELLS = ("bash", "zsh")
COMPLETE = "__complete"
"""The hidden command that completion scripts ask for candidates."""
STARTERS = {"rl": Path(__file__).parent / "starter" / "rl"}
"""The files that `m2forge init` writes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == [COMPLETE]:
            from m2forge.shell_completion import complete

            commands = {name: command.add_arguments for name, command in COMMANDS.items()}
            print(*complete(arguments[1:], commands), sep="\n", flush=True)
            return 0
        _refuse_unknown_command(arguments)
        args = _make_parser().parse_args(arguments)
        # torch's CPU allocator reads this on import: keep freed memory for a second, since a training step allocates
        # the same amount again at once.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
        if not sys.stderr.isatty():
            # huggingface_hub reads this on import: its progress bars are for terminals, not for logs.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from m2forge.observe.log import set_up_logging

        set_up_logging()
        args.run(args)
        sys.stdout.flush()
    except M2ForgeError as error:
        print(f"m2forge: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("m2forge: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output closed the pipe, as `| head` does; Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # A path that the system rejects: no permission, no space, a name too long.
        prefix = f"{error.filename}: " if error.filename else ""
        print(f"m2forge: error: {prefix}{error.strerror or error}; give a path that can be used", file=sys.stderr)
        return 2
    return 0


def command_params(args: argparse.Namespace) -> None:
    from m2forge.model import count
    from m2forge.model.preset import resolve_config

    config = resolve_config(args.model, revision=args.revision, layers=args.layers, overrides=args.set)
    report = count.count(config)
    print(json.dumps(report.to_dict()) if args.json else count.render(report))


def command_presets(args: argparse.Namespace) -> None:
    from m2forge.model.preset import DESCRIPTIONS

    width = max(len(name) for name in DESCRIPTIONS)
    for name, description in DESCRIPTIONS.items():
        print(f"{name:<{width}}  {description}")


def command_import(args: argparse.Namespace) -> None:
    from m2forge.model.convert import import_model
    from m2forge.model.hub import find_model

    print(import_model(find_model(args.source, args.revision), args.dest, dtype=args.dtype).describe())
    print(f"next: m2forge params {args.dest}")


def command_export(args: argparse.Namespace) -> None:
    if not 0 < args.max_shard_gb < float("inf"):
        raise ConfigError(f"--max-shard-gb {args.max_shard_gb}: expected a finite size above 0")
    from m2forge.model.convert import export_model
    from m2forge.model.hub import find_folder

    max_shard_bytes, folder = int(args.max_shard_gb * BYTES_PER_GB), find_folder(args.folder, args.revision)
    print(export_model(folder, args.dest, dtype=args.dtype, max_shard_bytes=max_shard_bytes).describe())
    print(f'next: transformers.AutoModelForCausalLM.from_pretrained("{args.dest}")')


def command_corpus(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.corpus.config import CorpusConfig

    config = load(CorpusConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_corpus, print_dry_run

        print_dry_run({"--set": config}, lambda: describe_corpus(config, args.dest, args.workers))
        return
    from m2forge.corpus.build import build_corpus

    print("\n".join(build_corpus(config, args.dest, num_workers=args.workers).lines()))
    print(f"next: m2forge pretrain CONFIG --set corpus={args.dest}")


def command_pretrain(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.pretrain.config import PretrainConfig

    config = load(PretrainConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_pretrain, print_dry_run

        config = _pinned(config, args.runs)
        print_dry_run({"--set": config}, lambda: describe_pretrain(config, args.runs))
        return
    with importing():
        from m2forge.pretrain.stage import run_pretrain

    folder = run_pretrain(config, args.runs)
    print(f"wrote {folder}; metrics in {folder.parent / 'metrics.jsonl'}")
    print(f"next: m2forge sft CONFIG --set model={folder}, or m2forge eval CONFIG --set model={folder}")


def command_sft(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.sft.config import SFTConfig

    config = load(SFTConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_sft, print_dry_run

        config = _pinned(config, args.runs)
        print_dry_run({"--set": config}, lambda: describe_sft(config, args.runs))
        return
    with importing():
        from m2forge.sft.stage import run_sft

    folder = run_sft(config, args.runs)
    print(f"wrote {folder}; metrics in {folder.parent / 'metrics.jsonl'}")
    print(f"next: m2forge eval CONFIG --set model={folder}")


def command_rl(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.rl.config import RLConfig

    config = load(RLConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_rl, print_dry_run

        config = _pinned(config, args.runs)
        print_dry_run({"--set": config}, lambda: describe_rl(config, args.runs))
        return
    with importing():
        from m2forge.rl.loop import run_rl

    folder, checks = run_rl(config, args.runs)
    for check in checks:
        print(f"step {check.step}: {check.success:.1%} ±{check.margin:.1%} of {check.num_tasks} held-out tasks")
    print(f"wrote {folder}; metrics in {folder.parent / 'metrics.jsonl'}")


def command_pipeline(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.pipelines.config import PipelineConfig

    config = load(PipelineConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_pipeline, print_dry_run

        print_dry_run({"--set": config}, lambda: describe_pipeline(config, args.runs))
        return
    with importing():
        from m2forge.pipelines.run import run_pipeline

    run_dir = run_pipeline(config, args.runs)
    print(f"wrote {run_dir}; yields in {run_dir / 'yields.json'}")


def command_eval(args: argparse.Namespace) -> None:
    from m2forge.config import load
    from m2forge.trials.config import TrialEvalConfig

    config = load(TrialEvalConfig, args.config, args.set)
    if args.dry_run:
        from m2forge.dry_run import describe_eval, print_dry_run
        from m2forge.model.hub import pinned

        config = pinned(config)
        print_dry_run({"--set": config}, lambda: describe_eval(config))
        return
    from rich.console import Console

    if config.measures:
        with importing():
            from m2forge.evaluate.run import run_eval

        run_eval(config, console=Console())
        print(f"wrote {config.output}: the report, the table and the plots")
    if config.trials is not None:
        with importing():
            from m2forge.trials.run import run_trials

        run_trials(config, console=Console())
        print(f"wrote {config.output}: the trials and their report")


def command_init(args: argparse.Namespace) -> None:
    from m2forge.files import staged_folder

    with staged_folder(args.dest) as folder:
        for path in STARTERS[args.kind].iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
    print(f"wrote {args.dest}: {', '.join(sorted(path.name for path in args.dest.iterdir()))}")
    print(f"next: cd {args.dest} and python model.py; docs/tutorial.md explains the files")


def command_image(args: argparse.Namespace) -> None:
    from datetime import datetime

    from m2forge.sandbox.image import DIGEST, ImageStore

    store, names = ImageStore(), list(args.names)
    num_wanted = {"build": range(2, 1 << 20), "list": range(1), "rm": range(1, 1 << 20), "prune": range(1 << 20)}
    if len(names) not in num_wanted[args.action]:
        raise ConfigError(
            "image: expected `build NAME SOURCE…`, `list`, `rm NAME…`, or `prune [FOLDER…]`; see m2forge image --help"
        )
    match args.action:
        case "build":
            built = store.build(names[0], names[1:])
            print(f"{built.name} {DIGEST}{built.digest}")
        case "list":
            for image in store.images():
                created = datetime.fromtimestamp(image.created_s).isoformat(" ", "seconds")
                print(f"{image.name:30} {DIGEST}{image.digest[:12]}  {created}  {image.source}")
        case "rm":
            for name in names:
                print(f"removed {store.remove(name).name}")
        case "prune":
            from m2forge.tasks.folders.folder import read_folders
            from m2forge.tasks.folders.task_image import BUILT, built_names

            folders = [folder for name in names for folder in read_folders(Path(name))[0]]
            kept = {name for folder in folders for name in built_names(folder.path)}
            print(f"removed {len(store.prune(BUILT, kept))} images that were built for task folders")


def command_chat(args: argparse.Namespace) -> None:
    from m2forge.config import build
    from m2forge.inference.config import LLMConfig, SamplingParams

    config = build(LLMConfig, {}, args.set, origin="chat")
    params = build(SamplingParams, {}, args.sampling, origin="chat")
    if params.n != 1:
        raise ConfigError(f"--sampling n={params.n}: an answer is one completion; leave n out")
    if updates := sorted({"on_weight_update", "stale_cache"} & config.model_fields_set):
        raise ConfigError(f"--set {updates[0]}: chat never updates the weights; leave it out")
    with importing():
        from m2forge.inference.chat import run_chat

    run_chat(
        args.model,
        config,
        params,
        system=args.system,
        workspace=args.workspace,
        has_tools=args.tools,
        revision=args.revision,
    )


def command_atif(args: argparse.Namespace) -> None:
    from m2forge.page.atif import write_atif

    if args.num is not None and args.num < 1:
        raise ConfigError(f"--num {args.num}: expected 1 or more")
    num = write_atif(args.run_dir, args.dest, args.num, args.least)
    print(f"wrote {args.dest}: {num} trajectories")


def command_page(args: argparse.Namespace) -> None:
    from m2forge.page.serve import serve_page

    serve_page(args.run_dir, args.host, args.port, lambda url: print(f"{args.run_dir} on {url}", flush=True))


def command_completion(args: argparse.Namespace) -> None:
    from m2forge.shell_completion import script

    print(script(args.shell), end="")


def _pinned(config: "RunConfigT", runs: Path) -> "RunConfigT":
    """The config of a run with the commit of its hub model."""
    from m2forge.model.hub import pinned
    from m2forge.train.run_dir import CONFIG_FILE

    return pinned(config, runs / config.name / CONFIG_FILE)


def _add_params(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset, a TOML file, a model folder or a hub id")
    add_revision(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="count a slice of N layers")
    add_set(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_presets(parser: argparse.ArgumentParser) -> None:
    """This command takes no arguments."""


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, a GGUF file or a hub id")
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write; must not exist or be empty")
    add_revision(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: as they are stored)")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the model folder to read, or a hub id")
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write; must not exist or be empty")
    add_revision(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: as they are stored)")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest file (default: 5)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="+", metavar="CONFIG", help="TOML files; later ones override keys of earlier ones"
    )
    add_set(parser)
    add_dry_run(parser)


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write; a killed build resumes")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="the folder of run directories (default: runs)"
    )


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(STARTERS), help="rl: tasks, verifier, agent and configs of an RL run")
    parser.add_argument("dest", type=Path, metavar="DIR", help="the folder to write; must not exist or be empty")


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("build", "list", "rm", "prune"),
        help="build NAME SOURCE…, list, rm NAME…, or prune [FOLDER…]: remove what was built for task folders, except "
        "for these",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="the image's name; for build then its sources, the last on top: a folder, a tar, a folder with a "
        "Dockerfile (needs podman), or another image",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a model folder, a GGUF file, a hub id, or a preset (random weights)"
    )
    add_revision(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the chat format's)")
    parser.add_argument("--tools", action="store_true", help="offer a shell and files; each call is confirmed first")
    parser.add_argument(
        "--workspace", type=Path, metavar="DIR", help="working directory of the tools (default: the current folder)"
    )
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a sampling parameter, such as temperature=0.7, top_p=0.95, max_tokens=512 or seed=1",
    )
    add_set(parser, "override a key of the engine")


def _add_page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="the directory of a run, such as runs/NAME, or a folder of runs"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8600, metavar="N", help="port to listen on (default: 8600; 0: any free port)"
    )


def _add_atif(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of an RL run, such as runs/NAME")
    parser.add_argument("dest", type=Path, metavar="DIR", help="the folder to write; must not exist or be empty")
    parser.add_argument("--num", type=int, metavar="N", help="the newest N attempts alone (default: all)")
    parser.add_argument("--least", type=float, metavar="R", help="attempts with at least this reward alone")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='the shell, as in: eval "$(m2forge completion bash)"')


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS = {
    "params": Command("count a model's parameters, memory and FLOPs", _add_params, command_params),
    "presets": Command("list the model presets", _add_presets, command_presets),
    "plan": Command("what fits on GPUs, how fast, for how much", plan_command.add_arguments, plan_command.run),
    "import": Command("bring a published model into a model folder", _add_import, command_import),
    "export": Command("write a model folder in the Hugging Face layout", _add_export, command_export),
    "corpus": Command("build token shards from documents", _add_corpus, command_corpus),
    "pretrain": Command("train a base model over a corpus, or resume its run", _add_run, command_pretrain),
    "sft": Command("fine-tune a model on trajectories, or resume its run", _add_run, command_sft),
    "rl": Command("train a model as an agent by RL, or resume its run", _add_run, command_rl),
    "pipeline": Command("make tasks and trajectories of raw material", _add_run, command_pipeline),
    "eval": Command("measure a model: a table and plots", _add_config, command_eval),
    "init": Command("write the files of a first run of your own", _add_init, command_init),
    "tasks": Command("check, lint, show and convert tasks", tasks_command.add_arguments, tasks_command.run),
    "image": Command("build, list or remove the images of sandboxes", _add_image, command_image),
    "serve": Command(
        "serve a model by HTTP: the vendors' APIs, and token ids", server_command.add_serve, server_command.run_serve
    ),
    "chat": Command("talk with a model in the terminal", _add_chat, command_chat),
    "gateway": Command(
        "serve agents: the vendors' APIs in, every token recorded",
        server_command.add_gateway,
        server_command.run_gateway,
    ),
    "page": Command("show a run, or a folder of runs, in the browser", _add_page, command_page),
    "atif": Command("write a run's attempts as ATIF trajectories, with token ids", _add_atif, command_atif),
    "completion": Command("print a completion script for a shell", _add_completion, command_completion),
}


class _Help(argparse.Action):
    """Prints a command's usage, then the schema of its config."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from rich.console import Console

        from m2forge.command_config import config_kinds
        from m2forge.config_help import render_schema

        kinds = config_kinds(str(self.const))
        schemas = [render_schema(kind, option, Console()) for option, kind in kinds.items()]
        print(parser.format_help(), *schemas, sep="\n", end="", flush=True)
        parser.exit()


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m2forge", description="Train M2-style mixture-of-experts models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"m2forge {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.summary, description=command.summary, allow_abbrev=False, add_help=False
        )
        command.add_arguments(subparser)
        subparser.add_argument("-h", "--help", action=_Help, const=name, help="show this help and the config keys")
        subparser.set_defaults(run=command.run)
    return parser


def _refuse_unknown_command(arguments: Sequence[str]) -> None:
    """argparse lists all commands for an unknown one; suggest the closest instead."""
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        raise NotFoundError(f"unknown command {name!r}; {suggest(name, COMMANDS)}")
