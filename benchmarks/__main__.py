"""``python -m benchmarks [NAME …] [--all] [--device cpu|cuda] [--repeats N] [--quick]``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from benchmarks._document import describe
from benchmarks._runner import (
    TESTS_WITH_PEERS,
    Context,
    find_benchmarks,
    run_benchmark,
    run_in_peers_environment,
    run_peer_tests,
    write_result,
)
from fulltilt.errors import DeviceError, format_nearest


def main(arguments: Sequence[str] | None = None) -> int:
    found = find_benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(found))
    parser.add_argument("--all", action="store_true", help="run every benchmark of this device")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions of verdict_power")
    parser.add_argument("--quick", action="store_true", help="few repetitions; nothing is written")
    parser.add_argument(
        "--peer-tests", action="store_true", help="instead: the tests that need the peers, in their environment"
    )
    parser.add_argument("--here", action="store_true", help="in this environment, even where peers are needed")
    args = parser.parse_args(arguments)
    if args.peer_tests:
        return run_peer_tests(TESTS_WITH_PEERS)
    chosen = _choose(parser, args, found)
    if args.device != "cpu":
        from fulltilt.engine.build.builder import check_device

        try:  # what is missing is said once and not by each benchmark
            check_device(args.device)
        except DeviceError as error:
            parser.error(str(error))
    context = Context(device=args.device, quick=args.quick, n_repeats=args.repeats)
    failures = 0
    for name, module in chosen.items():
        if obstacle := getattr(module, "find_obstacle", lambda context: None)(context):
            print(f"{name}: skipped on {context.device}: {obstacle}", flush=True)
        elif module.NEEDS_PEERS and not args.here:
            failures += run_in_peers_environment(name, context) != 0
        else:
            result = run_benchmark(name, module, context)
            said = "quick: nothing was written, and too few repetitions for an interval"
            said = said if args.quick else f"written: {write_result(result)}"
            print(describe(result, f"{name}-{context.device}.json", with_arms=True), *result.notes, said, sep="\n")
    return min(failures, 1)


def _choose(
    parser: argparse.ArgumentParser, args: argparse.Namespace, found: dict[str, ModuleType]
) -> dict[str, ModuleType]:
    if bool(args.names) == args.all:
        parser.error("give names, or --all, not both" if args.all else f"give names, or --all: {', '.join(found)}")
    for name in args.names:
        if name not in found:
            parser.error(f"no benchmark named {name}; {format_nearest(name, found)}")
        if args.device not in found[name].DEVICES:
            parser.error(f"{name} runs on {', '.join(found[name].DEVICES)}, not on {args.device}")
    names = args.names or [name for name, module in found.items() if args.device in module.DEVICES]
    return {name: found[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
