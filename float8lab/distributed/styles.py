"""Styles of torch's ``parallelize_module`` that gather activations in FP8.

Torch's own ``ColwiseParallel`` and ``RowwiseParallel`` also run a converted layer's GEMMs in FP8,
but move activations between ranks in high precision. The styles here have the names and arguments
of torchao's. The layer casts its operands first and then gathers them: one byte per element, and
scales. A layer that stays in high precision gathers in high precision.

Importing this file imports DTensor, which takes as long as all of float8lab; ``import float8lab``
does not import this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from float8lab.arguments import check_dtype, check_flags, check_instance
from float8lab.formats import FP8_DTYPES

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class Float8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` that gathers its input in FP8 if the input is a shard of tokens.

    Arguments are those of ``ColwiseParallel``: ``input_layouts``, the placement of a plain input
    tensor, by default ``Replicate()``; ``output_layouts``, the placement of the output, by default
    ``Shard(-1)``; ``use_local_output``, whether the output is a plain tensor.

    Source: torchao, ``torchao.float8.float8_tensor_parallel``, whose names and meaning these are.

    >>> from torch.distributed.tensor import Shard
    >>> Float8ColwiseParallel(input_layouts=Shard(1)).input_layouts
    (Shard(dim=1),)
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Sequence[Placement], desired_input_layouts: Sequence[Placement],
        mod: nn.Module, inputs: Sequence[Tensor], device_mesh: DeviceMesh,
    ) -> DTensor:  # fmt: skip
        x = _placed(inputs[0], device_mesh, input_layouts)
        if hasattr(mod, "output_layout"):  # a float8lab.Linear casts first and then gathers
            return x
        return x.redistribute(placements=desired_input_layouts)


class Float8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` that gathers the output's gradient in FP8 if tokens are sharded there.

    Arguments are those of ``RowwiseParallel``: ``input_layouts``, the placement of a plain input
    tensor, by default ``Shard(-1)``; ``output_layouts``, the placement of the output, by default
    ``Replicate()``; ``use_local_output``, whether the output is a plain tensor.

    Source: torchao, ``torchao.float8.float8_tensor_parallel``, whose names and meaning these are.

    >>> from torch.distributed.tensor import Shard
    >>> Float8RowwiseParallel(output_layouts=Shard(1)).output_layouts
    (Shard(dim=1),)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear):
            (layout,) = self.output_layouts
            vars(module)["output_layout"] = layout  # float8lab.Linear reads it
        return super()._apply(module, device_mesh)


_Layouts = Placement | tuple[Placement | None, ...] | None


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` that leaves gathering tokens to the layers, which do it in FP8.

    If an input is sharded and is to be replicated, the module gets the shard as a DTensor. With
    ``use_local_output`` it gets plain unsharded tensors, gathered in high precision.

    Args:
        float8_dtype: accepted but ignored; each layer casts by its own recipe.
        fwd_config_submodule_fqn: accepted but ignored.

    The other arguments are those of ``PrepareModuleInput``.

    Source: torchao, ``torchao.float8.float8_tensor_parallel``, whose names and meaning these are.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> how = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    >>> PrepareFloat8ModuleInput(**how).desired_input_layouts
    (Replicate(),)
    """

    def __init__(  # torchao's signature
        self,
        *,
        input_layouts: _Layouts = None,
        desired_input_layouts: _Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        check_flags(use_local_output=use_local_output)
        check_dtype("float8_dtype", float8_dtype, FP8_DTYPES, optional=False)
        name = fwd_config_submodule_fqn
        check_instance("fwd_config_submodule_fqn", name, str, "a name", optional=True)
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )

    def _prepare_input_arg(
        self, input: Tensor, mesh: DeviceMesh, input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Tensor:  # fmt: skip
        gathers = desired_layout is not None and desired_layout.is_replicate()
        if input_layout is None or not gathers or self.use_local_output:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        return _placed(input, mesh, (input_layout,))


def _placed(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, placements, run_check=False)
