"""Define the command ``python -m float8lab scale``."""

from __future__ import annotations

import argparse

from float8lab.checkpoints.replacing import write_text
from float8lab.commands.terminal import add_output_options, count
from float8lab.inspect.scale.mesh import Links, parse
from float8lab.inspect.scale.predict import Job
from float8lab.inspect.scale.report import Scale, scale
from float8lab.inspect.scale.search import RECIPES
from float8lab.inspect.scale.sizes import KNOWN, model_size
from float8lab.recipes.cost import MODES

__all__ = ["add_commands"]

_DESCRIPTION = f"""\
Predict a training step of a transformer on many H200s, with what FP8 gains, the memory of a GPU,
the fastest mesh, and where FP8 stops paying. MODEL is one of {", ".join(KNOWN)}; or sizes, as
layers=32,width=4096,heads=32,groups=8,ffn=14336,vocabulary=128256; or a Transformers configuration
file. Nothing is run."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the subparsers; ``options.run(options)`` returns the exit status."""
    command = commands.add_parser(
        "scale",
        help="predict steps of a model on many GPUs",
        description=_DESCRIPTION,
        epilog="Exit status: 0; 2 if the model cannot be read or shared, or for wrong arguments.",
    )
    command.add_argument("--model", required=True, help="name, sizes, or configuration file")
    command.add_argument("--gpus", type=count, help="(default: those of the mesh, or 8)")
    command.add_argument(
        "--mesh", help="as dp=32,tp=8,cp=4,pp=1,ep=1 (default: the fastest); dp may be left out"
    )
    command.add_argument(
        "--recipe", action="append", choices=tuple(RECIPES), help="may be repeated (default: all)"
    )
    work = command.add_argument_group("the work")
    work.add_argument("--sequence", type=count, default=8192, help="tokens (default: 8192)")
    work.add_argument("--batch", type=count, help="sequences of a step (default: one a GPU)")
    work.add_argument("--micro-batch", type=count, help="sequences (default: the fastest)")
    work.add_argument(
        "--recompute", action=argparse.BooleanOptionalAction,
        help="recompute each layer's forward in backward (default: where memory asks for it)",
    )  # fmt: skip
    work.add_argument("--mode", choices=MODES, default="compile", help="(default: compile)")
    work.add_argument(
        "--fused", action="store_true", help="TransformerLayer, in place of converted layers"
    )
    work.add_argument(
        "--shard", type=count, default=0, help="ranks that share parameters (default: all)"
    )
    work.add_argument(
        "--tp-overlap", type=_part, default=0.0, metavar="PART",
        help="part of tensor parallel communication that is hidden, 0 to 1 (default: 0)",
    )  # fmt: skip
    machine = command.add_argument_group("the machines")
    links = Links()
    machine.add_argument("--node", type=count, default=links.node, help="GPUs (default: 8)")
    machine.add_argument(
        "--nvlink", type=count, default=round(links.nvlink / 1e9), metavar="GB/S",
        help="bytes that a GPU sends within a machine (default: %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--network", type=count, default=round(links.network / 1e9), metavar="GB/S",
        help="bytes that a GPU sends to other machines (default: %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--memory", type=count, default=141, metavar="GB", help="of a GPU (default: %(default)s)"
    )
    add_output_options(command, limit=10)
    command.add_argument("--svg", metavar="OUT", help="also write the picture to OUT")
    command.set_defaults(make=_scale)


def _part(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1; got {text!r}")
    return fraction


def _scale(options: argparse.Namespace) -> Scale:
    size = model_size(options.model)
    mesh = parse(options.mesh, options.gpus) if options.mesh else None
    gpus = mesh.gpus if mesh is not None else options.gpus or 8
    network, nvlink = 1e9 * options.network, 1e9 * options.nvlink
    links = Links(node=options.node, nvlink=nvlink, network=network)
    job = Job(
        batch=options.batch or gpus, sequence=options.sequence, mode=options.mode,
        fused=options.fused, shard=options.shard, tp_overlap=options.tp_overlap,
        memory=1e9 * options.memory, links=links,
    )  # fmt: skip
    recipes = {name: RECIPES[name] for name in options.recipe or RECIPES}
    layout = {"mesh": mesh, "micro": options.micro_batch, "recompute": options.recompute}
    prediction = scale(size, gpus, recipes, job, **layout)
    if options.svg is not None:
        write_text(options.svg, prediction.picture())
    return prediction
