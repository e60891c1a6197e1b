"""One layer under context, tensor and data parallelism together, on eight ranks."""

from torch.distributed.fsdp import fully_shard

from tests.distributed.ranks import Ranks, each_check
from tests.distributed.test_context_parallel import B, D, H, S, assert_layers, layer, sized


def check_layer_equals_the_layer_of_one_rank(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, 2, 2, names=("dp", "cp", "tp"))
    group = mesh["cp"].get_group()
    parallel_layer = layer(
        ranks, num_gqa_groups=4, tp_group=mesh["tp"].get_group(), set_parallel_mode=True
    )
    parallel_layer.set_context_parallel_group(group, None, None, "p2p")
    fully_shard(parallel_layer, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    x = sized(ranks, S, B, H * D)
    assert_layers(ranks, layer(ranks, num_gqa_groups=4), parallel_layer, group, x)


test_on_ranks = each_check(__name__, 8, cpu=8)
