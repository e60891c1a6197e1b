"""The shards of ``torch.chunk``, and the blocks that cross them."""

import itertools

import torch

from float8lab.distributed.shard_map import ShardMap


def owners_of_rows(shards: ShardMap) -> list[tuple[int, int]]:
    """The run and the rank of each row of the unsharded matrix."""
    return [
        (run, rank)
        for run in range(shards.outer)
        for rank, length in enumerate(shards.lengths)
        for _ in range(length * shards.inner)
    ]


def test_shards_are_those_of_torch_chunk():
    for size, ranks in itertools.product(range(20), range(1, 6)):
        x = torch.arange(size)
        chunks = x.chunk(ranks) if size else ()
        for rank in range(ranks):
            shards = ShardMap.of(size, ranks, rank)
            want = chunks[rank].tolist() if rank < len(chunks) else []
            assert shards.shard(x, 0).tolist() == want
            assert (shards.start, shards.length) == (want[0] if want else size, len(want))
        assert shards.lengths == [*map(len, chunks), *[0] * (ranks - len(chunks))]
        assert shards.is_even == (len(set(shards.lengths)) == 1)


def test_blocks_cross_shards_where_they_have_rows_of_two_ranks():
    for size, ranks, inner, outer in itertools.product(range(9), (1, 2, 3, 4), (1, 2, 3), (1, 2)):
        shards = ShardMap.of(size, ranks, 0, inner=inner, outer=outer)
        owners = owners_of_rows(shards)
        assert len(owners) == shards.unsharded_rows
        for block in range(1, 8):
            starts = range(0, len(owners), block)
            groups = [set(owners[start : start + block]) for start in starts]
            crosses = any(len(group) > 1 for group in groups)
            assert shards.block_crosses_shards(block) or not crosses
            if not shards.block_crosses_shards(block):
                spans = [
                    ShardMap.of(size, ranks, rank, inner=inner, outer=outer).blocks(block)
                    for rank in range(ranks)
                ]
                block_counts = [span.length * outer for span in spans]
                assert block_counts == [
                    sum(rank in {r for _, r in group} for group in groups) for rank in range(ranks)
                ]
