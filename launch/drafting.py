"""Drafting as a run's flags ask for it: what of that the checkpoint can do, and the proposer of a rank."""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..models.checkpoint.draft_kind import SHOWN
from ..models.dspark.calibration import load_calibration
from ..models.dspark.drafter import make_drafter
from ..models.dspark.finite import DraftScales, FiniteProposer
from ..models.dspark.mtp import MtpProposer, make_mtp
from ..models.dspark.proposer import DSparkProposer, Proposer
from ..models.dspark.schedule import ALLOWED, parse_verify
from ..models.dspark.shape import DraftShape, draft_shape, require_dspark
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from .flags import FlagError, check_range

SPECULATIVE = ("none", "dspark", "mtp")
MOST_DRAFTS = 1 << 10


@dataclass(frozen=True)
class Drafting:
    """speculative: the drafter, "none" for plain decoding. gamma: drafts of a block, 0 for none. verify: which of them
    are verified, as `parse_verify` reads it; temperatures: of the confidences, where these matter and were calibrated.
    point: the likeliest ones, also where the target samples. compare: measure what it is worth."""

    speculative: str = "none"
    gamma: int = 0
    verify: str = "all"
    point: bool = False
    compare: bool = False
    temperatures: tuple[float, ...] | None = None

    @property
    def on(self) -> bool:
        """Whether anything is drafted."""
        return self.speculative != "none"

    @property
    def least_context(self) -> int:
        """Positions that a request must have for an engine to time its steps, where it does."""
        return self.gamma + 3 if self.on and parse_verify(self.verify).uses_costs else 1

    def arguments(self, proposer: Proposer | None) -> dict[str, Any]:
        """Keywords of Engine for this proposer, or for plain decoding."""
        if proposer is None:
            return {}
        verify = parse_verify(self.verify)
        return {
            "proposer": proposer, "point_drafts": self.point, "verify": verify, "temperatures": self.temperatures,
        }  # fmt: skip


def add_drafting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a verb's parser. None, or False, is a flag that was not given."""
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--speculative", choices=SPECULATIVE, default="none", help="drafter of the checkpoint to use (default: none)"
    )
    group.add_argument(
        "--gamma", type=int, metavar="N", help="drafts of a request in a step (default: dspark's block, 1 with mtp)"
    )
    group.add_argument(
        "--verify",
        metavar="WHICH",
        help=f"drafts that are verified: {ALLOWED}. The last two time steps at the start (default: all)",
    )
    group.add_argument(
        "--point-drafts", action="store_true", help="draft the likeliest tokens also where tokens are drawn"
    )
    group.add_argument(
        "--compare", action="store_true", help="run the prompts without drafting too, in turn, and tell the speed-up"
    )


def drafting_flags(args: argparse.Namespace, config: V4Config, directory: Path) -> Drafting:
    """The flags, checked against the checkpoint, with what was calibrated for it. FlagError naming flag, value and what
    is allowed; ValueError for a calibration that does not fit."""
    given = {"--gamma": args.gamma, "--verify": args.verify}
    given |= {"--point-drafts": args.point_drafts or None, "--compare": args.compare or None}
    if args.speculative == "none":
        for flag, value in given.items():
            if value is not None:
                said = flag if value is True else f"{flag} is {value}, but"
                raise FlagError(f"{said} needs a drafter, and --speculative is none; allowed: without it")
        return Drafting()
    if args.speculative != config.drafter:
        has = SHOWN.get(config.drafter, "no drafter")
        kinds = [kind for kind in SPECULATIVE if kind in ("none", config.drafter)]
        raise FlagError(f"--speculative is {args.speculative}, but {directory} has {has}; allowed: {', '.join(kinds)}")
    if args.point_drafts and args.temperature == 0:
        raise FlagError("--point-drafts needs --temperature above 0: at 0 all drafts are the likeliest tokens")
    gamma = _gamma(args.speculative, args.gamma, config)
    verify = "all" if args.verify is None else args.verify
    try:
        policy = parse_verify(verify)
    except ValueError as problem:
        raise FlagError(f"--{problem}") from problem
    calibrated = load_calibration(directory, gamma) if policy.uses_confidence else None
    temperatures = None if calibrated is None else calibrated.temperatures
    return Drafting(args.speculative, gamma, verify, args.point_drafts, args.compare, temperatures)


def _gamma(speculative: str, given: int | None, config: V4Config) -> int:
    if speculative == "mtp":
        if given not in (None, 1):
            raise FlagError(f"--gamma is {given}, allowed: 1, for an MTP layer drafts one token")
        return 1
    gamma = require_dspark(config).block_size if given is None else given
    check_range("--gamma", gamma, 1, MOST_DRAFTS)
    return gamma


def make_proposer(drafting: Drafting, weights: Mapping[str, torch.Tensor], model: Model) -> Proposer | None:
    """This rank's proposer from its share of mtp.*; None where nothing is drafted.

    It shares embedding, head, kernels and clock with the model. Its key rows take no round trip through FP8, for those
    of the target take none. In w8a8 a row of it that is NaN or infinite ends the step, as one of the target's does.
    """
    if not drafting.on:
        return None
    scales = None if model.numerics.quantisation is None else DraftScales()
    ends = (model.config, weights, model.embed, model.head, model.groups, model.numerics)
    proposer: Proposer
    if drafting.speculative == "mtp":
        proposer = MtpProposer(replace(make_mtp(*ends, watch=scales, clock=model.clock), kernels=model.kernels))
    else:
        shape = _shape(drafting, model)
        drafter = make_drafter(*ends, shape=shape, watch=scales, clock=model.clock)
        proposer = DSparkProposer(replace(drafter, kernels=model.kernels))
    return proposer if scales is None else FiniteProposer(proposer, scales)


def _shape(drafting: Drafting, model: Model) -> DraftShape:
    with warnings.catch_warnings():
        if model.groups.rank:
            # All ranks have the same gamma: world rank 0 warns for all.
            warnings.simplefilter("ignore")
        return draft_shape(model.config, drafting.gamma)
