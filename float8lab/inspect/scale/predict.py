"""Predict time and memory of a training step on one GPU of a mesh.  M tokens, D width, F features.

A step is ``batch / dp / micro`` micro-batches on each data parallel rank, and an optimizer step. A
micro-batch is a forward and a backward pass through the layers of a stage. ``recipes/cost.py`` has
the seconds of the GPU's work. Seconds of communication count only where no work hides them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from float8lab.inspect.scale.mesh import Links, Mesh
from float8lab.inspect.scale.sizes import ModelSize
from float8lab.recipes import cost
from float8lab.recipes.recipe import Recipe

__all__ = [
    "COMPUTE", "KINDS", "RING", "Job", "Seconds", "Step", "activation", "attention_block", "gemms",
    "kept", "layer", "norm", "passing", "passing_bytes", "predict",
]  # fmt: skip

COMPUTE = ("gemm", "quantize", "attention", "elementwise", "sharding", "optimizer")
"""Kinds of a GPU's own work, in this order: GEMMs; casts; attention; norms, activations and sums;
copies of sharded parameters; the optimizer."""
KINDS = (*COMPUTE, "tp", "cp", "ep", "dp", "bubble")
"""All kinds of time: ``COMPUTE``, communication by purpose, and waiting for another stage."""
RING = 0.9
"""Relative speed of attention while keys and values go round a ring: 90 % of ideal, forward and
backward, as published for 8 GPUs (github.com/zhuzilin/ring-flash-attention, zigzag)."""
_REDUCTION = 10e-6
"""Seconds of an all-reduce of a few amaxes."""
_REDUCTIONS: dict[tuple[int, ...], int] = {(-1, -1): 8, (1, -1): 4}
"""All-reduces of amaxes in each layer under tensor parallelism, by block: for x and dy of 4 linear
layers, or for operands whose rows are split. Delayed scaling has a single one in a step."""
_FORWARD = {"gemm": 1 / 3, "quantize": 1 / 2, "attention": 1 / 3.5, "cpu": 1 / 2}
"""The forward pass's fraction of the seconds of both passes; for other kinds it is 0.4."""

Seconds = dict[str, float]
"""Seconds by kind; time of kind ``"cpu"`` passes in parallel with that of the other kinds."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a step, and how the GPUs do it."""

    sequence: int = 8192
    batch: int = 1
    """The number of sequences of a step, on all GPUs together."""
    micro: int = 1
    """The number of sequences of a micro-batch on each data parallel rank."""
    recompute: bool = False
    """Whether backward recomputes each layer's forward (activation checkpointing)."""
    mode: str = "compile"
    """One of ``recipes.cost.MODES``."""
    fused: bool = False
    """Whether layers are ``TransformerLayer``, which computes norms and activations in casts."""
    sustained: bool = True
    """Whether the GPU is at its power limit, as in training."""
    fp8_gather: bool = True
    """Whether FP8 layers gather their sharded weights in FP8."""
    tp_overlap: float = 0.0
    """The fraction of tensor parallel communication that GEMMs hide."""
    shard: int = 0
    """The number of ranks that shard parameters; copies of this group all-reduce their gradients. 0
    means all data and context parallel ranks."""
    weight_bytes: int = 4
    """Bytes of an element of the parameters, gradients and each of Adam's two moments."""
    memory: float = 141e9
    """Bytes of a GPU's memory."""
    links: Links = field(default_factory=Links)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A predicted training step on one GPU of a mesh."""

    mesh: Mesh
    recipe: Recipe | None
    job: Job
    gpu: Seconds
    """Seconds by ``KINDS``."""
    cpu: float
    memory: dict[str, float]
    """Bytes at the peak by use: parameters, optimizer, gradients, activations and others."""

    @property
    def seconds(self) -> float:
        """The GPU's time or the CPU's, whichever is more."""
        return max(sum(self.gpu.values()), self.cpu)

    @property
    def tokens(self) -> float:
        """Tokens a second on each GPU."""
        return self.job.batch * self.job.sequence / self.mesh.gpus / self.seconds

    @property
    def bytes(self) -> float:
        """Bytes of memory at the peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the step leaves 5 % of the GPU's memory, which the allocator cannot use."""
        return self.bytes <= 0.95 * self.job.memory


def total(pieces: Iterable[Seconds], times: float = 1.0) -> Seconds:
    """Sum seconds by kind, and multiply the sums by ``times``."""
    sums: Seconds = defaultdict(float)
    for piece in pieces:
        for kind, seconds in piece.items():
            sums[kind] += times * seconds
    return dict(sums)


# Seconds of a layer's operations, forward and backward together.


def gemms(
    recipe: Recipe | None, M: int, weights: list[tuple[int, int]], job: Job, experts: int = 1
) -> Seconds:
    """Predict linear layers: their GEMMs, casts and CPU time."""
    estimate = partial(cost.estimate, mode=job.mode, sustained=job.sustained, experts=experts)
    seconds = zip(*(estimate(recipe, M, N, K) for N, K in weights), strict=True)
    return dict(zip(cost.Parts._fields, map(sum, seconds), strict=True))


def norm(recipe: Recipe | None, elements: float, *, fused: bool) -> Seconds:
    """Predict a norm, whose backward reads two tensors and writes one."""
    rate = cost.prologues(recipe if fused else None).norm
    return {"elementwise": elements * rate + cost.moved(6 * elements)}


def activation(
    recipe: Recipe | None, elements: float, *, gated: bool, fused: bool, eager: bool
) -> Seconds:
    """Predict an activation with this many results; a gated one has twice as many gradients.

    In eager mode, a gate in plain torch takes two kernels forward and three backward.
    """
    rates = cost.prologues(recipe if fused else None)
    seconds = rates.activation + (2 if gated else 1) * rates.gradient
    return {"elementwise": elements * (seconds + cost.moved(12 if gated and eager else 0))}


def attention_block(
    recipe: Recipe | None, M: float, length: int, q: float, kv: float, job: Job, cp: int = 1
) -> Seconds:
    """Predict rotary embedding and attention, which receives keys and values while it computes."""
    attended = cost.attention(recipe, M * q, length, sustained=job.sustained)
    return {
        "attention": attended / (RING if cp > 1 else 1.0),
        "elementwise": cost.moved(8 * M * (q + kv)),
    }


def layer(size: ModelSize, recipe: Recipe | None, job: Job, mesh: Mesh) -> Seconds:
    """Predict a layer for a micro-batch on a GPU, without the communication of parameters."""
    M = job.micro * job.sequence // mesh.cp
    hidden = M * size.width / mesh.tp
    fused = job.fused and recipe is not None
    pieces = [
        gemms(recipe, M, size.attention_weights(mesh.tp), job),
        attention_block(recipe, M, job.sequence, size.q / mesh.tp, size.kv / mesh.tp, job, mesh.cp),
        norm(recipe, 2 * hidden, fused=fused),
        {"elementwise": cost.moved(24 * hidden)},  # two sums in each pass
        _mlp(size, recipe, M, job, mesh, fused),
        _communication(size, recipe, M, job, mesh),
    ]
    seconds = total(pieces)
    # The ring moves keys and values forward, and also their gradients backward, during attention.
    keys = 4 * M * size.kv * mesh.cp / mesh.tp
    ring = 3 * job.links.seconds(keys, mesh.cp, mesh.tp, ring=True)
    seconds["cp"] = max(0.0, ring - seconds["attention"])
    return seconds


def _mlp(
    size: ModelSize, recipe: Recipe | None, M: int, job: Job, mesh: Mesh, fused: bool
) -> Seconds:
    def mlp(rows: int, features: int, experts: int = 1) -> list[Seconds]:
        results = rows * features / mesh.tp
        return [
            gemms(recipe, rows, size.mlp_weights(features, mesh.tp), job, experts),
            activation(recipe, results, gated=size.gated, fused=fused, eager=eager),
        ]

    eager = job.mode == "eager" and not job.fused
    if not size.experts:
        return total(mlp(M, size.ffn))
    # As many rows come from other ranks as go to them.
    seconds = total(mlp(M * size.active, size.ffn, size.experts // mesh.ep))
    routed = M * size.active * size.width / mesh.tp
    seconds["elementwise"] += cost.moved(16 * routed)  # permuted and summed in each pass
    if size.shared:
        seconds = total([seconds, *mlp(M, size.shared)])
    return seconds


def _communication(size: ModelSize, recipe: Recipe | None, M: int, job: Job, mesh: Mesh) -> Seconds:
    links, elements = job.links, M * size.width
    widths = (1 if recipe is not None else 2, 2)
    gather, scatter = (links.seconds(width * elements, mesh.tp, 1) for width in widths)
    # Two of each in each pass, and wgrad gathers the two sharded inputs a second time.
    tp = (1 - job.tp_overlap) * (6 * gather + 4 * scatter)
    if recipe is not None and mesh.tp > 1 and not recipe.linear.delayed:
        tp += _REDUCTION * _REDUCTIONS.get(recipe.linear.x.block, 0)
    routed = 2 * elements * size.active / mesh.tp
    return {"tp": tp, "ep": 4 * links.seconds(routed, mesh.ep, mesh.tp)}


def _head(size: ModelSize, M: int, job: Job, mesh: Mesh) -> Seconds:
    """Predict the output layer in high precision, and the loss, which is in float32."""
    columns = -(-size.vocabulary // mesh.tp)
    seconds = gemms(None, M, [(columns, size.width)], job)
    return {**seconds, "elementwise": cost.moved(20.0 * M * columns)}


# Parameters of a GPU.


@dataclass(frozen=True)
class _Held:
    """The parameters of a layer that a GPU computes with, and how many ranks shard them."""

    dense: float
    experts: float
    shard: int
    expert_shard: int

    @property
    def all(self) -> float:
        return self.dense + self.experts

    @property
    def sharded(self) -> float:
        """The number of parameters that the GPU keeps."""
        return self.dense / self.shard + self.experts / self.expert_shard


def _held(size: ModelSize, job: Job, mesh: Mesh) -> _Held:
    """Count the parameters of one layer, and the ranks that shard them."""
    dense = (size.attention_parameters + size.dense_parameters) / mesh.tp
    experts = size.expert_parameters / mesh.tp / mesh.ep
    ranks = mesh.dp * mesh.cp
    shard = min(job.shard, ranks) if job.shard else ranks
    return _Held(dense, experts, shard, max(1, shard // mesh.ep))


def _exchange(held: _Held, recipe: Recipe | None, job: Job, mesh: Mesh) -> tuple[float, float]:
    """Predict seconds to gather one layer's parameters, and to reduce-scatter its gradients."""
    links, ranks = job.links, mesh.dp * mesh.cp
    width = 1 if recipe is not None and job.fp8_gather else 2
    experts = held.experts, held.expert_shard, mesh.tp * mesh.ep
    groups = ((held.dense, held.shard, mesh.tp), experts)
    gather = sum(links.seconds(width * count, n, stride) for count, n, stride in groups if count)
    scatter = sum(links.seconds(4 * count, n, stride) for count, n, stride in groups if count)
    if held.shard < ranks:  # copies all-reduce their shards, by a scatter and a gather
        copies = ranks // held.shard
        scatter += 2 * links.seconds(4 * held.sharded, copies, mesh.tp * held.shard)
    return gather, scatter


def passing(size: ModelSize, recipe: Recipe | None, job: Job, mesh: Mesh) -> Seconds:
    """Predict a forward and backward pass of a stage's layers, and its fraction of the head."""
    layer_seconds = layer(size, recipe, job, mesh)
    if job.recompute:
        forward = {kind: t * _FORWARD.get(kind, 0.4) for kind, t in layer_seconds.items()}
        layer_seconds = total([layer_seconds, forward])
    M = job.micro * job.sequence // mesh.cp
    layers, head = total([layer_seconds], -(-size.layers // mesh.pp)), _head(size, M, job, mesh)
    return total([layers, total([head], 1 / mesh.pp)])


def predict(size: ModelSize, recipe: Recipe | None, job: Job, mesh: Mesh) -> Step:
    """Predict a training step.

    Raises:
        ValueError: the mesh cannot share this model or batch, or not shard parameters as asked.

    >>> from float8lab.inspect.scale.mesh import Mesh
    >>> from float8lab.inspect.scale.predict import Job, predict
    >>> from float8lab.inspect.scale.sizes import KNOWN
    >>> step = predict(KNOWN["llama-3-8b"], None, Job(batch=8), Mesh(dp=8))
    >>> 0.5 < step.seconds < 1.0 and step.fits
    True
    """
    if why := mesh.why_not(size, job.sequence):
        raise ValueError(f"mesh {why}. Choose another mesh.")
    if job.batch % (mesh.dp * job.micro):
        raise ValueError(
            f"batch must be a multiple of dp times the micro-batch ({mesh.dp * job.micro}); "
            f"got {job.batch}. Pass a multiple."
        )
    ranks = mesh.dp * mesh.cp
    if job.shard and ranks % min(job.shard, ranks):
        raise ValueError(
            f"shard must divide the data and context parallel ranks ({ranks}); got {job.shard}. "
            "Pass a divisor."
        )
    count = job.batch // mesh.dp // job.micro
    layers = -(-size.layers // mesh.pp)
    micro_batch = passing(size, recipe, job, mesh)
    cpu = micro_batch.pop("cpu") * count
    gpu = dict.fromkeys(KINDS, 0.0) | total([micro_batch], count)
    held = _held(size, job, mesh)
    vocabulary = size.vocabulary_parameters / mesh.tp / mesh.pp
    if ranks > 1:
        gather, scatter = _exchange(held, recipe, job, mesh)
        busy = sum(micro_batch.values()) / layers
        # Pipeline stages keep parameters gathered for all micro-batches, others regather for each.
        passes = count if mesh.pp == 1 else 1
        hiding = busy if mesh.pp == 1 else busy * count
        late = max(0.0, gather - hiding / 3) + max(0.0, gather + scatter - hiding * 2 / 3)
        gpu["dp"] = passes * layers * late + gather + scatter
        gpu["sharding"] = passes * cost.SHARDING * (layers * held.all + vocabulary)
    if mesh.pp > 1:
        far = mesh.gpus // mesh.pp * 2 > job.links.node
        rate = job.links.network if far else job.links.nvlink
        M = job.micro * job.sequence // mesh.cp
        between = 4 * M * size.width / mesh.tp / rate
        gpu["bubble"] = (mesh.pp - 1) * (sum(micro_batch.values()) + between) + count * between
    parameters = layers * held.sharded + vocabulary / held.shard
    gpu["optimizer"] = cost.moved(7 * job.weight_bytes * parameters)  # 4 are read and 3 are written
    memory = _memory(size, recipe, job, mesh, held, parameters, vocabulary, count)
    return Step(mesh=mesh, recipe=recipe, job=job, gpu=gpu, cpu=cpu, memory=memory)


# Memory of a GPU.


def kept(
    size: ModelSize, recipe: Recipe | None, job: Job, *, sharded: bool = False,
    half_input: bool = False,
) -> float:  # fmt: skip
    """Predict the bytes for each token that a layer keeps from forward to backward.

    A layer keeps q, k, v, the results of attention and of both sums, and the result of the MLP's
    first weight. High precision also keeps the results of both norms and of the activation. Outside
    of ``torch.compile``, both keep the result of the gate. FP8 layers recompute the other tensors
    that they cast (``save="auto"``). This was checked with "Memory" in benchmarks/RESULTS.md.

    Compiled layers ``sharded`` by FSDP2 were measured to keep what eager layers keep.
    ``half_input`` keeps the activation's input in FP8 (``fp8_activation_input``).
    """
    mlp = size.ffn * size.active + size.shared if size.experts else size.ffn
    inner = (2 if size.gated else 1) * mlp
    nbytes = 4 * size.width + 4 * size.q + 4 * size.kv
    if size.experts:
        nbytes += 4 * size.active * size.width  # permuted inputs and results
    eager = (job.mode == "eager" or sharded) and not job.fused and size.gated
    nbytes += (1 if half_input else 2) * inner + (2 * mlp if eager else 0)
    return nbytes if recipe is not None else nbytes + (6 if job.fused else 4) * size.width + 2 * mlp


def passing_bytes(
    size: ModelSize, recipe: Recipe | None, job: Job, *, half_input: bool = False
) -> float:
    """Predict the bytes for each token that backward of a layer needs besides the kept bytes."""
    mlp = size.ffn * max(1, size.active)
    inner = (2 if size.gated else 1) * mlp
    if recipe is not None:  # casts of the gradient of the MLP's first GEMMs, and of their prologue
        if job.mode == "compile" and not job.fused:
            return 2 * inner + mlp
        return (4 if half_input else 2) * inner + 2 * mlp + 2 * size.width
    return 2 * mlp + 2 * size.width if job.mode == "compile" and not job.fused else 2 * inner


def _memory(
    size: ModelSize, recipe: Recipe | None, job: Job, mesh: Mesh, held: _Held, parameters: float,
    vocabulary: float, count: int,
) -> dict[str, float]:  # fmt: skip
    M = job.micro * job.sequence / mesh.cp / mesh.tp
    layers = -(-size.layers // mesh.pp)
    waiting = min(count, mesh.pp)  # micro-batches of the first stage that wait for backward
    layer_nbytes = M * kept(size, recipe, job, sharded=mesh.dp * mesh.cp > 1)
    activations = waiting * layers * layer_nbytes
    if job.recompute:
        activations = waiting * layers * 2 * M * size.width + layer_nbytes
    logits = 8.0 * M * size.vocabulary  # in bfloat16 and float32, and their gradients
    width = 1 if recipe is not None and job.fp8_gather else 2
    gathered = 0.0
    if mesh.dp * mesh.cp > 1:  # one layer computes while the next is gathered
        gathered = width * held.all * (layers if mesh.pp > 1 else 2) + 2 * vocabulary / 2
    gradient = job.weight_bytes * parameters
    backward = logits + M * passing_bytes(size, recipe, job)
    states = {"parameters": gradient, "optimizer": 2 * gradient}
    if count == 1 and mesh.dp * mesh.cp > 1:
        if gradient > activations + backward + gathered:
            return {**states, "gradients": gradient}
        gradient = 0.0  # the last layers' gradients exist before the first layers' do
    passing_states = {"gathered": gathered, "activations": activations, "backward": backward}
    return {**states, "gradients": gradient, **passing_states}
