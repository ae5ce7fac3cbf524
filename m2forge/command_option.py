"""Command-line options that several commands share, each declared by one function."""

import argparse


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of a hub model (default: its main branch)"
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and what would run; start and write nothing"
    )


def add_set(parser: argparse.ArgumentParser, help: str = "override a config key") -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
