"""``fulltilt completion SHELL``: print what makes a shell complete commands and flags."""

import argparse

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(fulltilt completion bash)" in ~/.bashrc')


def run(args: argparse.Namespace) -> int:
    import shtab

    from fulltilt.cli import COMMANDS, build_parser

    print(shtab.complete(build_parser(*COMMANDS), shell=args.shell))
    return 0
