"""A job whose drafter fails on one rank: `python -m draft_job --ranks 4 --tp 2`."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from meshspark.launch.flags import FlagParser, add_common
from meshspark.launch.spawn import run_job
from meshspark.launch.worker import named_stage, resolve_here, run_main
from meshspark.models.dspark.draft import Choose
from meshspark.parallel.groups import Groups

FAILS, AFTER = 2, 3
"""The world rank that fails, and after how many steps in which it drafts."""


def _act(argv: Sequence[str]) -> int:
    parser = FlagParser(prog="draft_job", allow_abbrev=False)
    add_common(parser)
    return run_job("draft_job", argv, resolve_here(parser.parse_args(argv)), _job)


def _job(groups: Groups) -> None:
    # Not at the top: the launcher itself needs no model.
    from drafting import Call, rank_model, real_proposer, serve, watched

    from meshspark.models.request import SamplingParams

    inner, steps = real_proposer("float32", 5, groups), []

    class Failing(type(inner)):  # type: ignore[misc]
        def propose(self, anchors: Any, *args: Any, choose: Choose, **kwargs: Any) -> Any:
            steps.extend(anchors.blocks[:1])

            def fail(logits_BV: torch.Tensor, draft: int, own: range) -> torch.Tensor:
                if groups.rank == FAILS and len(steps) > AFTER:
                    raise RuntimeError("no more ink")
                return choose(logits_BV, draft, own)

            return super().propose(anchors, *args, choose=fail, **kwargs)

    model = rank_model("float32", groups)[0]
    with named_stage("step", lambda: inner.drafter.clock.current or model.clock.current):
        engine = watched("float32", Failing(inner.drafter), groups, requests=4)
        if groups.rank:
            engine.serve()
        else:
            serve(engine, [Call([7 + number, 9], SamplingParams(40)) for number in range(8)])
            engine.close()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(run_main("draft_job", lambda _: _act(arguments), arguments))
