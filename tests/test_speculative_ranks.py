"""Drafting on many ranks: what one rank writes, keeps and drafts, and nothing that only some ranks know."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drafting import (
    FORCED,
    NATURAL,
    RIGHT,
    TEXTS,
    WRONG,
    Call,
    Known,
    Recorder,
    Watch,
    Watched,
    agree,
    from_text,
    load_texts,
    oracle,
    real_proposer,
    save_texts,
    serial,
    serve,
    single,
    text_call,
    wanted,
    watched,
)
from rank_pool import RankPools, from_bytes, to_bytes
from test_speculative import GAMMAS, STARTS, check_results, company, forced, known_of, plain_ids, require_bits

from meshspark.models.request import SamplingParams
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def texts_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file of the texts of a mode, which ranks read instead of writing them."""

    def path(mode: str) -> str:
        found = tmp_path_factory.getbasetemp() / f"texts-{mode}.safetensors"
        if not found.exists():
            save_texts(serial(mode), found)
        return str(found)

    return path


def run_calls(engine: Watched, calls: Sequence[Call]) -> list | None:
    """World rank 0 takes the calls, the others serve -> results there."""
    if not engine.is_front:
        engine.serve()
        engine.caches.check_integrity()
        return None
    results = serve(engine, calls)
    engine.close()
    return results


def drive_company(groups: Groups, path: str, mode: str, gamma: int, seed: int, count: int) -> dict:
    texts = load_texts(path)
    watch = Watch(mode, texts)
    proposer = oracle(mode, gamma, Known(texts), groups)
    engine = watched(mode, proposer, groups, look=watch, seed=seed + groups.rank, requests=4, prefill_rows=80)
    results = run_calls(engine, company(texts, gamma, seed, count))
    return {"results": results, "fault": watch.fault, "table": watch.table, "proposed": proposer.proposed}


def check_company(
    ranks: RankPools, texts_of: Any, sizes: tuple[int, int, int], mode: str, gamma: int, count: int
) -> None:
    require_bits(mode)
    options = {"path": texts_of(mode), "mode": mode, "gamma": gamma, "seed": sum(sizes), "count": count}
    got = ranks.run(Topology(*sizes), "test_speculative_ranks:drive_company", timeout=280, **options)
    assert [one["fault"] for one in got] == [""] * sizes[0]
    # Tokens, drafts and survivals of all requests, as every rank of the world holds them in every step.
    assert all(one["table"] == got[0]["table"] for one in got)
    assert any(drafts for step in got[0]["table"] for _, _, drafts, _ in step)
    assert sum(one["proposed"] for one in got) > 0
    texts = serial(mode)
    check_results(texts, company(texts, gamma, sum(sizes), count), got[0]["results"])


@pytest.mark.parametrize(
    ("sizes", "mode", "count"),
    [
        ((4, 2, 4), "float64", 10),
        pytest.param((2, 2, 2), "float32", 16, marks=pytest.mark.slow),
        pytest.param((4, 4, 4), "float32", 16, marks=pytest.mark.slow),
        pytest.param((4, 2, 2), "bfloat16", 16, marks=pytest.mark.slow),
        pytest.param((4, 1, 4), "bfloat16", 16, marks=pytest.mark.slow),
        pytest.param((4, 2, 4), "w8a8", 16, marks=pytest.mark.slow),
    ],
)
def test_company_that_comes_and_goes(
    ranks: RankPools, texts_of: Any, sizes: tuple[int, int, int], mode: str, count: int
) -> None:
    """Caches held other noise on every rank before. Ids and caches are those of serial decoding on one rank."""
    check_company(ranks, texts_of, sizes, mode, 5, count)


def pairwise(gamma: int) -> list[tuple[int, int]]:
    """(start, drafts): 60 of them, in which all starts and kinds of drafts occur."""
    kinds = forced(gamma)
    return [(STARTS[(gamma + i) % len(STARTS)], kinds[i % len(kinds)]) for i in range(60)]


def drive_episodes(groups: Groups, path: str, mode: str, gamma: int) -> dict:
    texts = load_texts(path)
    watch = Watch(mode, texts)
    proposer = oracle(mode, gamma, Known(texts), groups)
    engine = watched(
        mode, proposer, groups, look=watch, start=from_text(texts), seed=groups.rank, requests=60, prefix_points=0
    )
    pairs = enumerate(pairwise(gamma))
    calls = [text_call(texts[TEXTS[i % len(TEXTS)]], start, gamma + 6, drafts) for i, (start, drafts) in pairs]
    results = run_calls(engine, calls)
    right = results is None or results == [wanted(texts[call.prompt[0]], call) for call in calls]
    return {"right": right, "fault": watch.fault, "table": watch.table, "proposed": proposer.proposed}


@pytest.mark.slow
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 1, 4)])
def test_pairwise_episodes(ranks: RankPools, texts_of: Any, sizes: tuple[int, int, int], gamma: int) -> None:
    options = {"path": texts_of("float64"), "mode": "float64", "gamma": gamma}
    got = ranks.run(Topology(*sizes), "test_speculative_ranks:drive_episodes", timeout=280, **options)
    assert [(one["right"], one["fault"]) for one in got] == [(True, "")] * sizes[0]
    assert all(one["table"] == got[0]["table"] for one in got)
    assert sum(one["proposed"] for one in got) > 0


def long_calls() -> list[Call]:
    return [Call([9, 200, 3], SamplingParams(512, seed=kind)) for kind in (NATURAL, RIGHT, FORCED + 2, WRONG)]


def drive_long(groups: Groups, ids: list[int]) -> list | None:
    proposer = oracle("float64", 5, known_of(long_calls(), [[ids, "length"]] * 4), groups)
    watch = Watch("float64")
    return run_calls(watched("float64", proposer, groups, look=watch, requests=3, max_context=520), long_calls())


@pytest.mark.slow
def test_512_tokens(ranks: RankPools) -> None:
    want = plain_ids("float64", long_calls()[:1], max_context=520)[0]
    got = ranks.run(Topology(4, 2, 4), "test_speculative_ranks:drive_long", timeout=290, ids=want[0])
    assert got[0] == [want] * 4


# What is drafted.


def natural_calls() -> list[Call]:
    """Four requests of uneven prompts, one of them sampled, and one whose beginning is an earlier one's. There is never
    something to do for all of four ranks."""
    draw = random.Random(6)
    stem = [draw.randrange(2, 260) for _ in range(140)]
    prompts = [stem, [draw.randrange(2, 260) for _ in range(33)], [8], [*stem[:130], 7, 7]]
    heat = (0.0, 0.8, 0.0, 0.0)
    return [
        Call(prompt, SamplingParams(14, heat[i], seed=4), step=(0, 0, 3, 26)[i]) for i, prompt in enumerate(prompts)
    ]


def drive_drafts(groups: Groups, mode: str, prefill_rows: int) -> dict:
    recorder = Recorder(real_proposer(mode, 5, groups))
    watch = Watch(mode)
    options = {"requests": 4, "prefill_rows": prefill_rows, "seed": groups.rank}
    engine = watched(mode, recorder, groups, look=watch, **options)
    results = run_calls(engine, natural_calls())
    drafted = [[*name, ids, to_bytes(confidence)] for name, (ids, confidence) in recorder.drafted.items()]
    return {"results": results, "table": watch.table, "drafted": drafted}


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ((2, 2, 2), "float32"),
        ((4, 4, 4), "float64"),
        pytest.param((4, 4, 4), "bfloat16", marks=pytest.mark.slow),
        pytest.param((4, 2, 4), "float32", marks=pytest.mark.slow),
        pytest.param((4, 1, 2), "float32", marks=pytest.mark.slow),
    ],
)
def test_every_topology_drafts_the_same(ranks: RankPools, sizes: tuple[int, int, int], mode: str) -> None:
    """Ids and confidences of every block are those of one rank that took its prompts whole; every rank of the world
    holds the same drafts, lengths and survivals. tp_rank 3 of four has no request, and some steps no row."""
    require_bits(mode)
    options = {"mode": mode, "prefill_rows": 32}
    got = ranks.run(Topology(*sizes), "test_speculative_ranks:drive_drafts", timeout=120, **options)
    assert all(one["table"] == got[0]["table"] for one in got)
    assert all(survivals for step in got[0]["table"] for _, _, drafts, survivals in step if drafts)
    want = drive_drafts(single(), mode, 200)
    assert got[0]["results"] == want["results"]
    found = {(request, anchor): rest for one in got for request, anchor, *rest in one["drafted"]}
    assert sum(len(one["drafted"]) for one in got) == len(found) == len(want["drafted"]) > 0
    for request, anchor, ids, confidence in want["drafted"]:
        assert found[request, anchor][0] == ids
        assert agree(from_bytes(found[request, anchor][1]), from_bytes(confidence), mode)
    if sizes[1] == 4:
        assert not got[3]["drafted"]


# Exchanges.


def drive_one_group(groups: Groups, path: str, drafts: int) -> dict:
    """Four requests, two in each dp group; only the first group's draft -> exchanges of each group of ranks by step."""
    texts, calls = load_texts(path), []
    for number in range(4):
        text = texts[TEXTS[number % 2]]
        calls.append(text_call(text, 5 + number, 24, drafts, draft=number % 2 == 0))
    watch, counted = Watch("float64", texts), []

    def look(engine: Watched) -> None:
        watch(engine)
        counted.append([group.sequence for group in (groups.control, groups.tp, groups.ep)])

    proposer = oracle("float64", 5, Known(texts), groups)
    results = run_calls(watched("float64", proposer, groups, look=look, requests=2), calls)
    right = results is None or results == [wanted(texts[call.prompt[0]], call) for call in calls]
    return {"right": right, "fault": watch.fault, "counted": counted, "proposed": proposer.proposed}


def steps_of(counted: Sequence[Sequence[int]]) -> list[list[int]]:
    """Exchanges of each step."""
    return [[b - a for a, b in zip(one, two, strict=True)] for one, two in itertools.pairwise(counted)]


def test_exchanges_do_not_depend_on_what_is_accepted(ranks: RankPools, texts_of: Any) -> None:
    """Requests that draft stand in one dp group only, and the other enters its exchanges; as many in every step in
    which somebody drafts, on all ranks, whether all or nothing is accepted."""
    kinds: list[set[tuple[int, ...]]] = []
    for drafts in (RIGHT, WRONG):
        options = {"path": texts_of("float64"), "drafts": drafts}
        got = ranks.run(Topology(4, 2, 4), "test_speculative_ranks:drive_one_group", timeout=120, **options)
        assert [(one["right"], one["fault"]) for one in got] == [(True, "")] * 4
        assert [one["proposed"] > 0 for one in got] == [True, True, False, False]
        assert all(steps_of(one["counted"]) == steps_of(got[0]["counted"]) for one in got)
        # The first steps bring control messages, and the last ones end requests.
        kinds.append({tuple(step) for step in steps_of(got[0]["counted"])[2:4]})
    assert kinds[0] == kinds[1] and len(kinds[0]) == 1


@pytest.mark.slow
def test_a_drafter_that_fails_on_one_rank_ends_all() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join([str(HERE), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "draft_job", "--ranks", "4", "--tp", "2", "--timeout", "60"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**environment, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 1
    messages = [line for line in done.stderr.splitlines() if line.startswith("meshspark")]
    assert messages == ["meshspark: rank 2 failed in stage markov: RuntimeError: no more ink"], done.stderr
