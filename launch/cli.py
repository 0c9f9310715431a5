"""`meshspark <verb>`: a table of verbs. Each is also `python -m meshspark.launch.<module>`."""

import importlib
import sys
from collections.abc import Sequence

VERBS = {
    "generate": ("generate", "write text with a checkpoint on a mesh of ranks"),
    "doctor": ("doctor", "say whether this machine can run the ranks"),
    "checkpoint": ("checkpoint", "inspect a checkpoint, or synthesize a random one"),
    "convert": ("convert", "weights in another form: convert w8a8 IN OUT, convert dspark import|export IN OUT"),
    "calibrate": ("calibrate", "fit a drafter's confidences to what its target accepts"),
    "features": ("features", "run a target over samples and keep what a drafter is trained on"),
    "train-drafter": ("train_drafter", "train a drafter against a frozen target"),
    "make-sample": ("make_sample", "train the bundled sample"),
    "plan": ("plan", "memory, exchanges and step time of a deployment, before any device is there"),
    "fixture": ("fixture", "prove one transport or stage: fixture list, fixture run NAME"),
    "diagnose": ("diagnose", "read from outside where the ranks of a job stand"),
    "bench": ("bench", "measure: bench collectives, context, decode, failures, replay, speculative, compare"),
}
"""Verb -> (module of launch/, what it does)."""


def usage() -> str:
    """The help text."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {what}" for verb, (_, what) in VERBS.items()]
    return "\n".join(["usage: meshspark VERB [flags]", "", *lines, "", "meshspark VERB --help lists a verb's flags."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; its exit code. 2 for an unknown one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not arguments or arguments[0] not in VERBS:
        given = f"verb is {arguments[0]!r}, allowed: {', '.join(VERBS)}\n" if arguments else ""
        print(f"{given}{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{VERBS[arguments[0]][0]}", __package__)
    code: int = module.main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
