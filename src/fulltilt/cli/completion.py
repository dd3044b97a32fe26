"""``fulltilt completion SHELL``: print what makes a shell complete commands, flags and files."""

import argparse

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(fulltilt completion bash)" in ~/.bashrc')


def run(args: argparse.Namespace) -> int:
    import shtab

    from fulltilt.cli import COMMANDS, build_parser, list_leaves

    parser = build_parser(*COMMANDS)
    for leaf in list_leaves(parser):
        for action in leaf._actions:
            if action.nargs != 0 and action.type is None and action.choices is None:  # a text, a file in most cases
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(parser, shell=args.shell))
    return 0
