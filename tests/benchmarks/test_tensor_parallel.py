"""The benchmarks of tensor and context parallelism, on two processes of a CPU with tiny sizes."""

import argparse

import pytest

from benchmarks import context_parallel, overlap, tensor_parallel
from benchmarks.models import LayerSize
from tests.distributed.ranks import Ranks, each_check


def check_overlapped_gemms_are_accepted(ranks: Ranks) -> None:
    options = argparse.Namespace(tokens="64", recipe=["block"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LLAMA", LayerSize(D=256, H=4, G=2, F=512, batch=1, sequence=64))
        result_rows = list(overlap.rows(options, ranks.device))
    assert len(result_rows) == 8
    assert all(row.refusal is None and len(row.values) == 3 for row in result_rows)


def check_context_parallel_attention_is_accepted(ranks: Ranks) -> None:
    options = argparse.Namespace(precision=None, comm_type=None)
    heads = context_parallel.AttentionHeads(4, 2, 16)
    result_rows = list(context_parallel.rows(64, options, ranks.device, heads))
    assert [row.name for row in result_rows] == ["ideal", "p2p", "all_gather", "a2a", "a2a+p2p"] * 2
    assert all(row.refusal is None and min(row.values.values()) > 0 for row in result_rows)
    assert all(
        column.text(result_rows[1], result_rows[0]) for column in context_parallel.SUBJECT.columns
    )


def check_all_candidates_are_accepted_and_measured(ranks: Ranks) -> None:
    size = LayerSize(D=256, H=4, G=2, F=512, batch=2, sequence=32)
    options = argparse.Namespace(
        recipe=["current"], only="", seed=0, seconds=0.01, rounds=1, eager=True, one_thread=True
    )
    rows = list(tensor_parallel.rows(size, options, ranks.device))
    refusals = {row.name: row.refusal for row in rows if row.refusal is not None}
    assert not refusals, refusals
    assert sum(row.baseline for row in rows) == 1
    assert all(row.values["sustained ms"] > 0 for row in rows)
    times = [row.ms for row in rows]
    assert ranks.gather(times) == [times] * ranks.world  # the times are those of the slowest rank
    gathered = {row.name: row.values["gathered x bf16"] for row in rows}
    assert gathered.pop("DTensor, bfloat16, eager") == 1
    assert gathered["TransformerLayer, current"] < gathered["TransformerLayer, bfloat16"]


def test_communication_is_exposed_where_nothing_else_runs():
    exposed, partly_overlapped, compute = (0.0, 2.0, True), (3.0, 6.0, True), (3.0, 5.0, False)
    assert tensor_parallel.exposed_ms([exposed, partly_overlapped, compute]) == 3.0
    assert tensor_parallel.exposed_ms([(0.0, 9.0, False), partly_overlapped]) == 0.0
    names = ["ncclDevKernel_AllGather_RING_LL", "Memcpy PtoP (Device -> Device)", "barrier_kernel"]
    assert all(tensor_parallel.COMMUNICATION.search(name) for name in names)
    assert not tensor_parallel.COMMUNICATION.search("nvjet_qqtst_128x256_128x4_1x2_h_TNT")


test_on_ranks = each_check(__name__, 2)
