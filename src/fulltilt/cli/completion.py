"""``fulltilt completion SHELL``: print what makes a shell complete commands, flags and files."""

import argparse

SHELLS = ("bash", "zsh", "fish", "tcsh")
NO_FILES = ("6m", "10m", "60s", "12GiB", "ID", "NAME", "D", "U", "URL", "URI")
"""What the help calls values that are no files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    said = (
        'bash: eval "$(fulltilt completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc, after compinit; '
        "fish: fulltilt completion fish > ~/.config/fish/completions/fulltilt.fish"
    )
    parser.add_argument("shell", choices=SHELLS, help=said)


def run(args: argparse.Namespace) -> int:
    import shtab

    from fulltilt.cli import COMMANDS, build_parser, list_leaves
    from fulltilt.cli.init import list_examples

    parser = build_parser(*COMMANDS)
    for leaf in list_leaves(parser):
        for action in leaf._actions:
            metavar = str(action.metavar)
            if action.nargs == 0 or action.type is not None or action.choices is not None or metavar in NO_FILES:
                continue
            if metavar == "NAME|module:object":
                action.choices = tuple(list_examples())
            elif "|" in metavar and ":" not in metavar:
                action.choices = metavar.split("|")
            else:  # a text, a file in most cases
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(parser, shell=args.shell))
    return 0
