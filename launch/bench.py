"""`meshspark bench <what>`: dispatches to the benchmarks."""

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "collectives": "collectives",
    "context": "context",
    "decode": "decode",
    "drafters": "drafters",
    "failures": "failures",
    "prefill": "prefill",
    "quality": "quality",
    "replay": "replay",
    "speculative": "speculative",
    "compare": "report",
}
"""Benchmark -> module of benchmarks/."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; its exit code. 2 for an unknown one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = arguments[0] if arguments else ""
    if wanted in ("-h", "--help"):
        print(f"usage: meshspark bench {{{','.join(BENCHMARKS)}}} [flags]")
        return 0
    if wanted not in BENCHMARKS:
        print(f"meshspark bench: {wanted!r} is no benchmark, allowed: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"...benchmarks.{BENCHMARKS[wanted]}", f"{__package__}.bench")
    code: int = module.main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
